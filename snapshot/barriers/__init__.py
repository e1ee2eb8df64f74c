"""Barriers of continuous jobs: alignment, checkpoints under way, triggers and watermarks."""
