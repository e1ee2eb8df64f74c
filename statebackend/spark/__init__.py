"""Drives the operators in the micro-batches of Spark Structured Streaming."""
