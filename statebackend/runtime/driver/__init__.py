"""The driver's side of a job in both modes: its session, replies, operators and cleaning."""
