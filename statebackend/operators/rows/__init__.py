"""Rows of Spark's row API, to and from Arrow columns."""
