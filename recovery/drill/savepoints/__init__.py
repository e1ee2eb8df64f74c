"""Savepoints of a drill's job: asked for, looked at, begun with."""
