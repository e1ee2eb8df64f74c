"""Small pandas frames, one per key, made and collected cheaply."""
