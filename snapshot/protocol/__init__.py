"""The protocol of a run's epochs: coordinator, messages, acks, lineage, bases."""
