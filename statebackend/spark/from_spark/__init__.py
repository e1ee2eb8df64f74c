"""Brings the state of Spark's own operators here."""
