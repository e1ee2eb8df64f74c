"""State as tables: read without Spark, and without claiming the job."""
