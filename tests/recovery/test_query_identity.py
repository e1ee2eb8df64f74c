"""Which job a query is, and when a temporary one is removed: without Spark."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from statebackend.errors import CheckpointLocationError
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.services import Services
from statebackend.spark.start.query_identity import _remove, refuse_other_place

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class _Query:
    """A query whose end is waited for in vain: the wait is cut, as by a lost connection."""

    def __init__(self, *, active: bool | None) -> None:
        self._active = active

    def awaitTermination(self) -> None:
        raise ConnectionError("the JVM does not answer")

    @property
    def isActive(self) -> bool:
        if self._active is None:
            raise ConnectionError("the JVM does not answer")
        return self._active


class _Run:
    """What the driver has of a query, with a record on its way."""

    def __init__(self, job: Job, *, drains: bool) -> None:
        self.name, self.server, self.session = "run", self, self
        self._job, self._drains = job, drains

    def remove(self, name: str) -> None:
        """The server lets go of the session."""

    def drain(self, timeout_s: float) -> bool:
        self._job.store.create("log/1", b"the last record")
        return self._drains


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job((tmp_path / "store").as_uri(), "temporary-1")
    made.store.create("log/0", b"a record")
    yield made
    Services.running.pop(made.store.uri, None)


def _left(job: Job) -> list[str]:
    return sorted(found.name for found in job.store.list(""))


@pytest.mark.parametrize("active", [True, None])
def test_a_job_is_not_removed_while_its_query_may_run(
    job: Job, active: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    query: Any = _Query(active=active)
    with caplog.at_level(logging.WARNING, "statebackend.spark"):
        _remove(query, job, 1.0)
    assert _left(job) == ["log/0"]
    assert "'temporary-1'" in caplog.text
    assert "left behind" in caplog.text


def test_a_job_is_removed_with_the_records_that_were_on_their_way(job: Job) -> None:
    query: Any = _Query(active=False)
    run: Any = _Run(job, drains=True)
    Services.running[job.store.uri] = run
    _remove(query, job, 1.0)
    assert _left(job) == []


def test_a_job_whose_record_is_still_on_its_way_is_left_behind(job: Job) -> None:
    query: Any = _Query(active=False)
    run: Any = _Run(job, drains=False)
    Services.running[job.store.uri] = run
    _remove(query, job, 1.0)
    assert _left(job) == ["log/0", "log/1"]


@pytest.mark.parametrize(
    ("prepared", "found", "one"),
    [
        ("file:/a/b", "file:///a/b", True),
        ("hdfs://name/a", "hdfs://name:8020/a/", True),
        ("file:/a/b", "file:/a/c", False),
        ("s3a://one/a", "s3a://two/a", False),
    ],
)
def test_the_place_that_was_prepared_is_the_one_that_spark_has(
    prepared: str, found: str, one: bool
) -> None:
    places: list[Any] = [
        SimpleNamespace(qualified=lambda path=path: path) for path in (prepared, found)
    ]
    if one:
        refuse_other_place(*places)
        return
    with pytest.raises(CheckpointLocationError, match="was prepared for it"):
        refuse_other_place(*places)
