"""A new local copy that is held."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.local.local_copies import StoreDirectory
from tests.recovery.local.small_copies import subtask


@pytest.fixture
def held(tmp_path: Path) -> Iterator[StoreDirectory]:
    made = subtask(tmp_path).create()
    yield made
    made.release()
