"""The page of a job's checkpoints: served by the driver, or for a store without one."""
