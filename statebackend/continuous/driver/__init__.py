"""The driver of a continuous job: its runs, checkpoints, restarts and savepoints."""
