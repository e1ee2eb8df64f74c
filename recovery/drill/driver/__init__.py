"""Runs in the process of a drill's driver; what it and the drill tell each other."""
