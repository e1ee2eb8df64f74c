"""Many stored rows to Arrow columns at once."""
