"""What may be deleted from a job's folder, and its deletion."""
