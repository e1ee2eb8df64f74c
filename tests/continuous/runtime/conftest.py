"""A world per test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.continuous.runtime.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()
