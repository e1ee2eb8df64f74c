"""Checks what a drill found, and reports it as text, JSON and a page."""
