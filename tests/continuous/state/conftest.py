"""Stores that a test's subtasks left open are closed before their folder goes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from recovery.local.store_pool import StorePool


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    yield
    if StorePool._instance is not None:
        StorePool._instance[1].close()
