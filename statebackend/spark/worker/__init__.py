"""Runs a subtask in one micro-batch."""

from statebackend.environment import refuse_hidden_packages

refuse_hidden_packages()  # first: a module below says it in words that nobody understands
