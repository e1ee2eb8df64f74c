"""Runs a subtask in one micro-batch."""

from statebackend.environment import refuse_hidden_packages

refuse_hidden_packages()  # before a module below fails at it, and names no file
