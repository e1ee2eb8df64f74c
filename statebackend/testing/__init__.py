"""Tests a processor on the real store, without Spark: `ProcessorTester`."""
