"""Reads a job's folder without claiming it: describe, verify, list."""
