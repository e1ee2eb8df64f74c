"""A worker's side of a subtask in both modes: its store, its processor, what its acks carry."""
