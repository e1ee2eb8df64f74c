"""What users write and test their processors with; see `statebackend.api.processors`."""
