"""The slots of a continuous job and the subtasks in them."""

from statebackend.environment import refuse_hidden_packages

refuse_hidden_packages()  # first: a module below says it in words that nobody understands
