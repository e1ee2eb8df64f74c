"""Local stores of these tests lie in memory: RocksDB syncs its files at every open and close.

None of them cuts the power; what a killed process leaves behind is the same on either disk.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = "/dev/shm"


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """As pytest's, on a disk in memory where there is one."""
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="statebackend-", dir=place) as path:
        yield Path(path)
