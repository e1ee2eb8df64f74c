"""Where a continuous job's rows go: in two phases, or at least once."""
