"""Savepoints: made, checked, copied, and begun with."""
