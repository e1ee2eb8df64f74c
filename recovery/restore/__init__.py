"""Carries a restore out in a worker: what is fetched, read and made anew."""
