"""The same programs with one import and one call more."""
