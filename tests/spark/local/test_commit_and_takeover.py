"""What Spark has committed is durable, one record says it, and one driver at a time writes it."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from snapshot.log.commit_log import CommitLog
from statebackend.errors import FencedError, StateBackendError
from statebackend.rpc.tls import driver_tls
from statebackend.runtime.driver.services import Services
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from tests.spark.local.processors import FailingLedger
from tests.spark.local.world import checkpoints, job_store, manifests, sources

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from recovery.decide.start_batch import LocationProgress
    from statebackend import StateBackend
    from tests.spark.local.world import World


@pytest.mark.promise
def test_every_batch_that_spark_commits_is_durable_before(world: World) -> None:
    seen: list[tuple[int, list[int], int, int]] = []

    def watching(frame: DataFrame, batch: int) -> None:
        lineage = backend.lineages().get("ledger")
        before = lineage.last_epoch if lineage else -1
        world.sink(frame, batch)
        seen.append((batch, world.committed(), before, backend.lineages()["ledger"].last_epoch))

    world.input.add_batches(3)
    backend = world.backend()
    world.run(backend, world.ledger(backend), watching)
    world.check(backend)
    assert seen == [(n, list(range(n)), n - 1, n) for n in range(3)]


def _kinds(world: World, backend: StateBackend) -> Counter[str]:
    """How many records of each kind there are; nothing else may be in the store."""
    log = backend._job.log()
    kinds = Counter(log.read(sequence).kind for sequence in log.sequences())
    everything = [p for p in (world.store / "default").rglob("*") if p.is_file()]
    assert len(everything) == sum(kinds.values())
    return kinds


def test_a_batch_costs_one_object_per_operator(world: World) -> None:
    world.input.add_batches(2)
    backend = world.backend()
    frame = world.ledger(backend)
    world.run(backend, frame)
    before = _kinds(world, backend)
    assert before["checkpoint"] == 2
    world.input.add_batches(3)
    world.run(backend, frame)
    assert _kinds(world, backend) - before == {"checkpoint": 3, "claim": 1}


def test_what_does_not_fit_into_the_record_is_an_object_of_its_own(world: World) -> None:
    world.input.add_batches(2)
    world.input.add_keys("k1")  # nothing changes in one of the subtasks
    world.run_ledger(settings={"inline_limit_bytes": 16})
    world.forget_local()
    world.input.add_batches(1)
    backend = world.run_ledger(settings={"inline_limit_bytes": 16})
    world.check(backend)
    assert set(sources(backend).values()) == {"durable"}
    slices = [entry for m in manifests(backend) for entry in m.slices]
    large = [entry for entry in slices if entry.size_bytes]
    assert len(slices) == 8
    assert len(large) == 7
    root = world.store / "default"
    names = {str(path.relative_to(root)) for path in world.objects("data")}
    assert names == {entry.object for entry in large}
    assert max(path.stat().st_size for path in world.objects("log")) < 4000
    assert sum(r.durable_reads for r in backend.restores()) == 5


@pytest.mark.promise
def test_a_driver_that_was_taken_over_stops_and_a_later_start_goes_on(world: World) -> None:
    takeovers: list[int] = []

    def taken_over(frame: DataFrame, batch: int) -> None:
        if batch == 1 and not takeovers:
            log = CommitLog(
                job_store(backend),
                job="default",
                writer="another driver",
                new_id=lambda: uuid.uuid4().hex,
            )
            takeovers.append(log.claim().generation)
        world.sink(frame, batch)

    world.input.add_batches(3)
    backend = world.backend()
    frame = world.ledger(backend)
    text = world.fail(backend, frame, taken_over)
    assert "SB4001" in text
    assert "taken over by the writer 'another driver'" in text
    assert isinstance(backend.failure, FencedError)
    assert world.committed() == [0]
    assert checkpoints(backend) == [("ledger", 0)]

    world.run(backend, frame, taken_over)
    world.check(backend)
    assert backend.failure is None
    assert checkpoints(backend) == [("ledger", n) for n in range(3)]
    assert [m.generation for m in manifests(backend)][-1] == takeovers[0] + 1


def test_a_start_that_was_overtaken_takes_nothing_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the log would be two batches ahead of the location, and nobody could start any more."""
    world.input.add_batches(3)
    backend = world.run_ledger()
    newest = manifests(backend)[-1]
    assert (newest.kind, newest.epoch) == ("checkpoint", 2)
    max(world.objects("log")).unlink()  # so the next start has to take Spark's commit back
    looks: list[bool] = []
    real = CheckpointLocation.progress

    def progress(self: CheckpointLocation) -> LocationProgress:
        looks.append(True)
        if len(looks) == 2:  # after the start's claim
            log = CommitLog(
                job_store(backend), job="default", writer="rival", new_id=lambda: uuid.uuid4().hex
            )
            log.claim()
        return real(self)

    monkeypatch.setattr(CheckpointLocation, "progress", progress)
    with pytest.raises(FencedError, match="taken over by the writer 'rival'"):
        world.run_ledger()
    assert len(looks) == 2
    assert world.committed() == [0, 1, 2]
    monkeypatch.undo()
    world.check(world.run_ledger())
    assert world.committed() == [0, 1, 2]


# --- secrets -------------------------------------------------------------------------------------


def _tokens(tls: bool) -> set[str]:
    """The tokens that the driver's service knows."""
    server = Services.servers.get(tls)
    return set() if server is None else {token for token, _ in server._sessions._known.values()}


def _event_log(world: World, folder: Path) -> Any:
    """A second event log on the running session, uncompressed."""
    context: Any = world.spark.sparkContext
    jvm = context._jvm
    folder.mkdir()
    listener = jvm.org.apache.spark.scheduler.EventLoggingListener(
        "tests",
        jvm.scala.Option.empty(),
        jvm.java.net.URI(folder.as_uri()),
        context._jsc.getConf().set("spark.eventLog.compress", "false"),
        context._jsc.sc().hadoopConfiguration(),
    )
    listener.start()
    context._jsc.sc().addSparkListener(listener)
    return listener


def _closure(frame: DataFrame) -> bytes:
    jframe: Any = frame._jdf
    command = jframe.queryExecution().analyzed().functionExpr().func().command()
    jvm: Any = frame.sparkSession._jvm
    return bytes(command.toArray(jvm.scala.reflect.ClassTag.Byte()))


def _holding(secret: bytes, folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if secret in path.read_bytes()]


@pytest.mark.parametrize("tls", [False, True])
def test_the_sessions_token_is_nowhere_to_be_read(
    world: World, caplog: pytest.LogCaptureFixture, tls: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.INFO, "py4j")  # py4j shows every argument of every call
    world.input.add_keys("a", "bad")
    flag = world.root / "flag"
    flag.touch()
    backend = world.backend(settings={"tls": int(tls)})
    frame = world.ledger(backend, processor=FailingLedger(str(flag), "bad"))
    listener = _event_log(world, world.root / "events")
    before, others = _tokens(tls), _tokens(not tls)
    try:
        text = world.fail(backend, frame)
        world.run(backend, frame)
        tokens = _tokens(tls) - before
    finally:
        context: Any = world.spark.sparkContext
        context._jsc.sc().listenerBus().waitUntilEmpty()
        context._jsc.sc().removeSparkListener(listener)
        listener.stop()
    world.check(backend)
    assert tokens
    events = b"".join(p.read_bytes() for p in (world.root / "events").rglob("*") if p.is_file())
    assert b"SparkListenerJobStart" in events
    closure = _closure(frame)
    assert b"SubtaskTask" in closure
    assert _tokens(not tls) == others
    secrets = {token.encode() for token in tokens}
    if tls:
        own = driver_tls(backend._settings)
        assert own is not None
        key = own.key.splitlines()[1]
        secrets.add(key)
        assert Services.servers[True].location.startswith("grpc+tls://")
        # Spark keeps broadcasts in files: the token's, and never the key.
        broadcasts = Path(context._temp_dir)
        assert all(_holding(token.encode(), broadcasts) for token in tokens)
        assert _holding(key, broadcasts) == []
    for secret in secrets:
        assert secret.decode() not in text
        assert secret.decode() not in caplog.text
        assert secret not in closure
        assert secret not in events
        # Store, checkpoint location and local copies stand below the same folder.
        assert _holding(secret, world.root) == []


def test_an_endpoint_shows_no_token() -> None:
    from statebackend.rpc.session_endpoint import Endpoint

    endpoint = Endpoint(location="grpc://here:1", session="job/run", token="very secret")
    assert "secret" not in repr(endpoint)
    assert "secret" not in f"{endpoint} {[endpoint]}"


def test_a_first_batch_that_was_cut_in_its_plan_does_not_spoil_the_location(world: World) -> None:
    """Spark 4.3 refuses a location for good in which it has left a file under way."""
    draft = f".0.{uuid.uuid4()}.tmp"

    def drafts() -> int:
        return len(list(world.location.glob(f"*/*{draft}*")))

    def cut() -> None:
        for folder in ("offsets", "commits"):
            (world.location / folder).mkdir(parents=True)
            for name in (draft, f".{draft}.crc"):
                (world.location / folder / name).touch()

    cut()
    world.input.add_batches(2)
    backend = world.run_ledger()
    world.check(backend)
    assert not drafts()
    world.location = world.root / "another"
    cut()
    with pytest.raises(StateBackendError):
        world.run_ledger()  # the job has another location
    assert drafts() == 4, "a start that is refused changes nothing"
