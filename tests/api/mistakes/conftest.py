"""One subtask of each flavour, and of those that have our own contexts."""

from __future__ import annotations

import pytest

from tests.api.mistakes.any_processor import FLAVOURS, Job


@pytest.fixture(params=FLAVOURS)
def job(request: pytest.FixtureRequest) -> Job:
    return Job(request.param)


@pytest.fixture(params=["keyed", "sides"])
def own(request: pytest.FixtureRequest) -> Job:
    return Job(request.param)
