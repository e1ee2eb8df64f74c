"""The slots of a continuous job and the subtasks in them."""

from statebackend.environment import refuse_hidden_packages

refuse_hidden_packages()  # before a module below fails at it, and names no file
