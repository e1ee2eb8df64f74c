"""Clusters of real processes on loopback, and the drivers in them, seen from outside."""
