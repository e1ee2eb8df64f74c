"""The faults of a drill: on requests, disks, clocks and processes, and when they strike."""
