"""The RPC between a job's processes: one Flight service, one token, one TLS."""
