"""A store that can be held up, and threads that wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.recovery.asynchronous.held_up import HeldUp


@pytest.fixture
def store() -> Iterator[HeldUp]:
    made = HeldUp()
    yield made
    made.gate.set()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool
