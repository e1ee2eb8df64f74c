"""``python -m tests.spark_suites``: see `tests.spark_suites.run`."""

import sys

from tests.spark_suites.run import main

if __name__ == "__main__":
    sys.exit(main())
