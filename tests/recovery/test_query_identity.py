"""Which job a query is, and when a temporary one is removed: without Spark."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from recovery.decide.start_batch import LocationProgress
from statebackend.errors import CheckpointLocationError, ObjectNotFoundError
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.services import Services
from statebackend.spark.start.query_identity import (
    IDENTITY_FILE,
    FoundJob,
    QueryIdentity,
    _beginning,
    _is_one_place,
    _remove,
    refuse_other_place,
)

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
        self._job.store.create("log/1", [b"the last record"])
        return self._drains


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job((tmp_path / "store").as_uri(), "temporary-1")
    made.store.create("log/0", [b"a record"])
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


# --- two drivers that begin at one location ------------------------------------------------------


class _Location:
    """A checkpoint location, as far as a query's identity is of it."""

    path = "/location"

    def __init__(self) -> None:
        self.files_: dict[str, bytes] = {}

    def qualified(self) -> str:
        return f"file:{self.path}"

    def write(self, name: str, pieces: Iterator[bytes]) -> None:
        self.files_.setdefault(name, b"".join(pieces))

    def chunks(self, name: str) -> Iterator[bytes]:
        if name not in self.files_:
            raise ObjectNotFoundError(name)
        yield self.files_[name]


def _found(location: Any, job: str, store: str) -> FoundJob:
    uri = f"file:///{store}"
    made = QueryIdentity(uri=uri, job=job, location=location.qualified())
    return FoundJob(made, Job(uri, job), location)


def test_of_two_first_starts_the_later_one_is_refused() -> None:
    location = _Location()
    _found(location, "clicks", "one").keep()
    _found(location, "clicks", "one").keep()
    with pytest.raises(CheckpointLocationError, match=r"'clicks' in file:///one.*file:///two"):
        _found(location, "clicks", "two").keep()


def test_of_two_first_starts_the_one_whose_file_was_replaced_is_stopped() -> None:
    location: Any = _Location()
    first = _found(location, "clicks", "one")
    first.keep()
    kept = location.files_.pop(IDENTITY_FILE)
    _found(location, "clicks", "two").keep()
    stopped: list[bool] = []
    query: Any = SimpleNamespace(stop=lambda: stopped.append(True))
    with pytest.raises(CheckpointLocationError, match="file:///two"):
        first.after_start(query, location, 1.0)
    assert stopped
    location.files_[IDENTITY_FILE] = kept
    first.after_start(query, location, 1.0)
    assert len(stopped) == 1


# --- a location that begins anew -----------------------------------------------------------------


def _with_progress(query_id: str | None) -> Any:
    location: Any = _Location()
    location.progress = lambda: LocationProgress(location.path, query_id, -1, -1)
    return location


def _began(tmp_path: Path, query_id: str | None, *, before: bool) -> FoundJob:
    uri = tmp_path.as_uri()
    if before:
        log = Job(uri, "clicks").log()
        log.claim(run="an earlier one", settings={})
    made = QueryIdentity(uri=uri, job="clicks", location="file:/location")
    return _beginning(made, _with_progress(query_id), Job)


def test_a_location_that_begins_anew_has_a_job_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "statebackend.spark"):
        found = _began(tmp_path, None, before=True)
    assert re.fullmatch(r"clicks-[0-9a-f]{8}", found.identity.job)
    assert found.job.name == found.identity.job
    assert found.job.manifests() == []
    (line,) = caplog.messages
    assert "'clicks'" in line
    assert found.job.name in line


@pytest.mark.parametrize(("query_id", "before"), [("query", True), (None, False)])
def test_a_location_that_has_batches_or_is_the_first_has_the_job_of_its_path(
    tmp_path: Path, query_id: str | None, before: bool
) -> None:
    assert _began(tmp_path, query_id, before=before).job.name == "clicks"


# --- which place it is ---------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("hdfs://nn:8020/x", "hdfs://nn/x"),
        ("s3a://bucket/x", "s3://bucket/x"),
        ("abfss://c@a.dfs.core.windows.net/x", "abfs://c@a.dfs.core.windows.net/x"),
        ("file:/a/x", "file:///a/x"),
    ],
)
def test_a_location_is_no_copy_of_itself_by_another_name(one: str, other: str) -> None:
    assert _is_one_place(one, other)
    assert _is_one_place(other, one)
    assert not _is_one_place(one, other + "y")


def test_a_location_behind_a_link_is_no_copy(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert _is_one_place(f"file:{tmp_path}/link", f"file:{tmp_path}/real")
    assert not _is_one_place(f"file:{tmp_path}/link", f"file:{tmp_path}/other")
