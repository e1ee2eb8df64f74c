"""What users write and test their processors with; see :mod:`statebackend.api.processors`."""
