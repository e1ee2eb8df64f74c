"""What a fault of a drill is: what it needs, reaches and waits for, and the preloaded library."""
