"""What micro-batches and continuous jobs share, on the driver and in workers."""
