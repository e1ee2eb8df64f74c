"""The commit log: its records, their cache, and progress events."""
