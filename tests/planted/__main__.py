"""``python -m tests.planted``: see `tests.planted.report`."""

import sys

from tests.planted.report import main

if __name__ == "__main__":
    sys.exit(main())
