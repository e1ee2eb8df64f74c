"""Continuous mode: a dataflow in one long-running Spark stage, with barriers in its channels."""
