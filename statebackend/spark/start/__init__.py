"""Starts a query on a job: its checkpoint location, its point of start, its savepoints."""
