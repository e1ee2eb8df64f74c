"""The formats of what a job stores: records, deltas, bases, and their names."""
