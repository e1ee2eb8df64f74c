"""The jobs that drills run, their inputs and outputs."""
