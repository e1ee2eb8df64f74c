"""Task-local copies on a host: their folders, their owners, and the pool of open stores."""
