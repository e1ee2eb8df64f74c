"""Reads an epoch's input: unpacks it, groups it by key, stages it on disk, finds late rows."""
