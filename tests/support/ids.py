"""Names of a test's cases."""

from __future__ import annotations

import re

__all__ = ["stable"]


def stable(value: object) -> str:
    """`repr` without addresses: two processes that collect the same tests must agree on names."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
