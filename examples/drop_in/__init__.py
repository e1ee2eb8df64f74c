"""Programs of PySpark, and the same with their state kept here: what differs is two lines."""
