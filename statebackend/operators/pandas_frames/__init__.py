"""Makes a small pandas frame per key, and collects those that come back."""
