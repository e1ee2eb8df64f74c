"""The one place that touches rocksdict: its traps are handled here, once."""
