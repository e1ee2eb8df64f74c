"""``python -m tests.crash``: see `tests.crash.run`."""

import sys

from tests.crash.run import main

if __name__ == "__main__":
    sys.exit(main())
