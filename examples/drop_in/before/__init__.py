"""The programs as Spark runs them."""
