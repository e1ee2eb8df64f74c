"""Savepoints made of tables, by Spark's tasks where they are large."""
