"""What the source and the sink of Kafka share: the connection, and the forms of values."""
