"""``python -m tests.kills``: see `tests.kills.run`."""

import sys

from tests.kills.run import main

if __name__ == "__main__":
    sys.exit(main())
