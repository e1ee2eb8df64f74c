"""The slots of a continuous job and the subtasks in them."""
