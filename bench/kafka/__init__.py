"""`python -m bench kafka`: a count by key from a topic of Kafka to a topic of Kafka."""
