"""Runs a drill: from what was asked for to its report."""
