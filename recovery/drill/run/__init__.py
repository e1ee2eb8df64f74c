"""A drill from what was asked for to its end."""
