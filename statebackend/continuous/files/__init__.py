"""Folders and formats that file sources and file sinks share."""
