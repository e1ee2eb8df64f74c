"""Keyed state over a confirmed base: the overlay, its freeze, and the kinds of state."""
