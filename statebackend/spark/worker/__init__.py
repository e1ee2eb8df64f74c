"""Runs a subtask in one micro-batch."""
