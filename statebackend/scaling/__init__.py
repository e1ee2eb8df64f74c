"""Parallelism that follows the load: what to measure, what to suggest, and who does it."""
