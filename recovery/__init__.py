"""How a job comes back: which copy for which key groups, and how it is fetched, cut and opened."""
