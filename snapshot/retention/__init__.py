"""Decides what may be deleted from a job's folder, and deletes it."""
