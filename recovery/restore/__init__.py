"""Carries a restore out in a worker, and uploads bases."""
