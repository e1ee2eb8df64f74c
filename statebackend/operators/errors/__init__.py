"""Errors of user code, of tasks and of Spark's JVM, as users see them."""
