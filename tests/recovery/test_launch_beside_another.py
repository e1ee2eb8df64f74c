"""A query that is started while another driver runs its job, without Spark."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import StructType

from recovery.decide import live_lineages
from statebackend.errors import (
    JobRunningError,
    NotRestorableError,
    StateMismatchError,
    UnsupportedQueryError,
)
from statebackend.operators.declared_states import StateDeclaration
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.operator_specs import Operator
from statebackend.settings import Settings
from statebackend.spark.start.launch import Launch
from statebackend.spark.start.launch_dependencies import StartOptions, Surroundings
from tests.recovery.driver import (
    JOB,
    MAX_PARALLELISM,
    Started,
    ack_of,
    begin_of,
    manifests_of,
    part_of,
    stamp_of,
)
from tests.recovery.test_starts_that_freeze import Files, Shared

if TYPE_CHECKING:
    from pathlib import Path


class _Location(Files):
    def _query_id(self) -> str | None:
        return "query"


class _Surroundings(Surroundings):
    """Those of a driver's process that runs no other query."""

    def __init__(self, location: _Location) -> None:
        self._location = location

    @property
    def starting(self) -> Any:
        return contextlib.nullcontext()

    @property
    def running(self) -> dict[str, Any]:
        return {}

    def server(self) -> Any:
        return SimpleNamespace(remove=lambda name: None)

    def location(self, path: str) -> _Location:
        return self._location

    def check_output(self, query: Any, operators: Any) -> None:
        """There are no plans of Spark's here."""


def _finish(run: Started | Launch, *epochs: int) -> None:
    for epoch in epochs:
        reply, _ = run.session.begin(begin_of(epoch))
        assert run.session.ack(ack_of(reply.chain, part_of({b"k": b"v"}), epoch)).durable


def _query() -> Any:
    stream = SimpleNamespace(
        getClass=lambda: SimpleNamespace(getSimpleName=lambda: "MicroBatchExecution"),
        resolvedCheckpointRoot=lambda: "/location",
    )
    return SimpleNamespace(
        id="query",
        isActive=True,
        stop=lambda: None,
        _jsq=SimpleNamespace(streamingQuery=lambda: stream),
    )


def _launch(job: Job, shared: Shared, *states: str) -> Launch:
    value = StructType().add("n", "long").json()
    declared = {one: StateDeclaration(name=one, kind="value", value_schema=value) for one in states}
    session: Any = SimpleNamespace(conf=SimpleNamespace(get=lambda name, default: default))
    return Launch(
        session,
        job,
        sessions=[session],
        operators={"op": Operator("op", 1, MAX_PARALLELISM, StructType(), declared)},
        settings=Settings.resolve({}, lambda _: None),
        options=StartOptions(allow_dropped_state=True),
        around=_Surroundings(_Location(shared, lambda: None)),
    )


def test_a_query_that_was_overtaken_fences_nobody_by_an_old_look_at_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path.as_uri(), JOB)
    other = Started(job.store, {"op": 1})
    _finish(other, *range(5))
    shared = Shared({batch: stamp_of(batch) for batch in range(6)}, set(range(5)))
    launch = _launch(job, shared)
    launch.prepare(None, "/location")
    _finish(other, 5, 6, 7)
    log = launch._start.log
    looks = [manifests_of(job.store)[:-5]]  # the listing that comes first lags
    real = log.manifests
    monkeypatch.setattr(log, "manifests", lambda *of: looks.pop() if looks else real(*of))
    with pytest.raises(JobRunningError, match=r"Epoch 7 .* started with batch 5"):
        launch.bind(_query())
    _finish(other, 8)


def test_a_start_follows_the_lineages_of_the_log_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path.as_uri(), JOB)
    _finish(Started(job.store, {"op": 1}), *range(5))
    followed: list[int] = []
    real = live_lineages.resolve
    monkeypatch.setattr(
        live_lineages, "resolve", lambda log: followed.append(len(log)) or real(log)
    )
    shared = Shared({batch: stamp_of(batch) for batch in range(6)}, set(range(5)))
    launch = _launch(job, shared)
    launch.prepare(None, "/location")
    launch.bind(_query())
    assert len(followed) == 1
    # What the run adds to them is its own: who starts next reads them anew.
    _finish(launch, 5)
    assert job.resolved.of(manifests_of(job.store))["op"].last_epoch == 5
    assert len(followed) == 2


def test_a_job_that_was_given_half_a_savepoint_since_the_start_is_not_claimed(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path.as_uri(), JOB)
    launch = _launch(job, Shared({0: stamp_of(0)}))
    launch.prepare(None, "/location")
    job.log().claim(settings={"savepoint": {"id": "1", "uri": "file:///saved", "records": 2}})
    with pytest.raises(NotRestorableError, match="was to begin with the savepoint file:///saved"):
        launch.bind(_query())
    assert [one.generation for one in manifests_of(job.store)] == [1]


def test_a_driver_that_changed_the_states_since_the_start_is_not_fenced(tmp_path: Path) -> None:
    job = Job(tmp_path.as_uri(), JOB)
    launch = _launch(job, Shared({0: stamp_of(0)}), "seen")
    launch.prepare(None, "/location")
    other = Started(job.store, {"op": 1})
    _finish(other, 0)
    with pytest.raises(StateMismatchError, match="Another driver of job 'clicks'"):
        launch.bind(_query())
    _finish(other, 1)


def test_a_start_that_is_interrupted_leaves_no_query_at_the_gate(tmp_path: Path) -> None:
    launch = _launch(Job(tmp_path.as_uri(), JOB), Shared({0: stamp_of(0)}))
    silenced: list[str] = []
    heartbeat: Any = SimpleNamespace(remove=silenced.append)
    launch._heartbeats = [heartbeat]
    with pytest.raises(KeyboardInterrupt), launch.given_up_on_error():
        raise KeyboardInterrupt
    assert silenced == [launch._name]
    with pytest.raises(UnsupportedQueryError, match="KeyboardInterrupt"):
        launch.session.check_finished(0)


def test_a_session_goes_although_its_query_cannot_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, query = _launch(Job(tmp_path.as_uri(), JOB), Shared()), _query()
    removed: list[str] = []
    server = SimpleNamespace(remove=removed.append)
    monkeypatch.setattr(launch._around, "server", lambda: server)
    query._jsq = None

    def stop() -> None:
        raise TimeoutError("the query does not stop")

    query.stop = stop
    with pytest.raises(TimeoutError), launch.given_up_on_error():
        launch.bind(query)
    assert removed == [launch._name]
