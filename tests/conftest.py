"""What every floor's tests share: hypothesis profiles and one Spark session."""

from __future__ import annotations

import math
import os
import time
import zlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support.local_session import local_session
from tests.support.process_stores import close_stores
from tests.support.s3 import *  # noqa: F403  (S3 servers, started when a test asks for one)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

settings.register_profile(
    "ci",
    # A fixed portion in CI: what a new draw would find belongs to whoever looks for it (dev).
    derandomize=bool(os.environ.get("CI")),
    deadline=None,
    max_examples=50,
    stateful_step_count=30,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("dev", deadline=None, max_examples=300, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

_UNTIL_S = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Each of N runs takes its share of the full suite, within its time."""
    parser.addoption(
        "--turn",
        default="0/1",
        metavar="K/N",
        help="of the tests marked full, share K (0 to N-1) of N; all of them without it",
    )
    parser.addoption(
        "--begin-within",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="skip the tests that would begin later than this; none without it",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Note when the run has to begin its last test."""
    config.stash[_UNTIL_S] = time.monotonic() + config.getoption("--begin-within")


@pytest.hookimpl(tryfirst=True)  # before a fixture is made for it
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what would begin too late: a slow machine leaves it to another run."""
    if time.monotonic() > item.config.stash[_UNTIL_S]:
        pytest.skip("the time of this run is over (--begin-within); `tox -e full` runs all")


@pytest.hookimpl(tryfirst=True)  # before xdist's own, which reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What starts Spark is of the full suite, but for what holds a promise of the README.

    Under xdist: Spark's tests by module, and those with processes of their own in one worker.
    """
    for item in items:
        if item.get_closest_marker("cluster"):
            group = "cluster"
        elif "spark" in getattr(item, "fixturenames", ()):
            group = item.path.name
        else:
            continue
        item.add_marker(pytest.mark.xdist_group(group))
        if not item.get_closest_marker("promise"):
            item.add_marker(pytest.mark.full)
    later = _of_other_turns(config.getoption("--turn"), items)
    config.hook.pytest_deselected(items=later)
    others = set(later)
    items[:] = [item for item in items if item not in others]


def _of_other_turns(turn: str, items: list[pytest.Item]) -> list[pytest.Item]:
    try:
        share, shares = map(int, turn.split("/"))
    except ValueError as error:
        raise pytest.UsageError(f"--turn {turn} is not like 0/3") from error
    if not 0 <= share < shares:
        raise pytest.UsageError(f"--turn {turn}: of {shares} shares, 0 to {shares - 1}")
    return [
        item
        for item in items
        # By the name, so that a new test moves no other one.
        if item.get_closest_marker("full") and zlib.crc32(item.nodeid.encode()) % shares != share
    ]


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    """No test leaves stores of its own process open."""
    yield
    close_stores()


@pytest.fixture(scope="session")
def spark(
    tmp_path_factory: pytest.TempPathFactory, aws_environment: None
) -> Iterator[SparkSession]:
    """A session of two local slots; every test shares it, none stops it."""
    session = local_session(tmp_path_factory.mktemp("spark"), {})
    yield session
    session.stop()
