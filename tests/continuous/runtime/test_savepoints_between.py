"""What goes over between continuous jobs and streaming queries, without Spark."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pytest
from blake3 import blake3

from recovery.savepoints.between_modes import (
    CONTINUOUS,
    has_no_key,
    is_continuous,
    lists_in,
    overtaken_in,
    state_for_query,
    state_for_stream,
    without,
)
from recovery.savepoints.state_at_epoch import KeptRecord, Needed, StateAt
from snapshot.formats.record import Manifest, SliceEntry
from statebackend.continuous.driver.job_from_savepoint import begin_with
from statebackend.continuous.sinks.callback_sink import CallbackSink
from statebackend.continuous.sinks.collect_sink import CollectSink
from statebackend.continuous.worker.overtaken_rows import (
    ELEMENT,
    ChannelQueue,
    Flight,
    Place,
    watermark,
    with_elements,
)
from statebackend.errors import (
    CheckpointLocationError,
    CorruptionError,
    MissingUidError,
    NotRestorableError,
    SettingError,
    UnsupportedFormatError,
)
from statebackend.operators.operator_snapshot import HeldOperatorState, StoredOperatorState
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.job_savepoints import (
    deadline_of,
    making_of,
    open_savepoint,
    saved_lineages,
)
from statebackend.schema.codec import codec_for
from statebackend.spark.frames.repeatable_sources import Source
from statebackend.spark.start.query_from_savepoint import NewQuery
from statebackend.spark.start.query_from_savepoint import begin_with as begin_query_with
from statebackend.state.operator_state import StoredList, decode_lists, encode_lists, redistribute
from tests.continuous.runtime.jobs import Numbers, Windows, windows_truth
from tests.continuous.runtime.world import soon
from tests.recovery.test_savepoint_later import Files

if TYPE_CHECKING:
    from recovery.savepoints.savepoint import Savepoint
    from tests.continuous.runtime.world import World

WINDOWS = "key BIGINT, start BIGINT, n BIGINT, total BIGINT"
SIZE_MS = 300

TEXT = Source("text", "text")


def windows(world: World, rows: int | None, per_s: float | None) -> CollectSink:
    sink = CollectSink()
    source = Numbers(rows, splits=1, rows_per_s=per_s, event_time="at", watermark_delay="5 ms")
    keyed = world.source(source).key_by("key")
    keyed.process(
        Windows(SIZE_MS), uid="windows", output_schema=WINDOWS, time_mode="event", event_time="at"
    ).sink(sink)
    return sink


@pytest.fixture
def saved(world: World) -> Savepoint:
    """Of a job that has fired windows, and has others open."""
    sink = windows(world, None, 1000)
    query = world.start(2)
    soon(lambda: len(sink.rows()) > 40)
    return query.stop_with_savepoint()


def manifests_of(state: StateAt) -> dict[str, Manifest]:
    found = {uid: state.last(uid) for uid in state.lineages}
    return {uid: one for uid, one in found.items() if one is not None}


def test_a_query_takes_over_operators_with_a_key_and_one_watermark(
    world: World, saved: Savepoint
) -> None:
    state = open_savepoint(saved, world.flow.setup.job).state()
    assert lists_in(state).keys() == {"source", "sink-windows"}
    seen_ms = manifests_of(state)["windows"].event_max_ms
    assert seen_ms
    taken = state_for_query(state)
    assert taken.lineages.keys() == {"windows"}
    assert taken.settings == {"operators": {"windows": 0}}
    assert {kept.manifest.operator for kept in taken.records} == {"windows"}
    assert manifests_of(taken)["windows"].watermark_ms == seen_ms
    assert saved_lineages(saved, world.flow.setup.job).keys() == {"windows"}
    with pytest.raises(NotRestorableError, match="no keyed operator"):
        without(state, {"windows", "source", "sink-windows"})


def test_a_stream_takes_over_the_watermark_that_was_in_force(
    world: World, saved: Savepoint
) -> None:
    """What a query saw is ahead of its watermark by the delay: by it rows in time would be late."""
    state = open_savepoint(saved, world.flow.setup.job).state()
    records = tuple(
        type(kept)(
            msgspec.structs.replace(kept.manifest, watermark_ms=1000, event_max_ms=9000),
            kept.slices,
        )
        for kept in without(state, {"source", "sink-windows"}).records
    )
    query = StateAt(state.epoch, records, {"windows": state.lineages["windows"]}, {})
    taken = manifests_of(state_for_stream(query))["windows"]
    assert (taken.event_max_ms, taken.second_max_ms, taken.watermark_ms) == (1000, 1000, 1000)


def test_which_records_are_which(world: World, saved: Savepoint) -> None:
    opened = open_savepoint(saved, world.flow.setup.job)
    store, state = opened.store, opened.state()
    found = manifests_of(state)
    assert not has_no_key(found["windows"])
    assert is_continuous(found.values())
    assert not is_continuous([])
    assert not has_no_key(msgspec.structs.replace(found["source"], schemas={}))
    with pytest.raises(CorruptionError):
        has_no_key(msgspec.structs.replace(found["source"], schemas={"": "[]"}))
    assert store.uri == saved.uri


class CutFiles(Files):
    """Fails at a write."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def write(self, name: str, pieces: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        super().write(name, pieces)


def test_a_query_begins_after_a_continuous_job_with_sources_that_gave_nothing(
    world: World, saved: Savepoint
) -> None:
    job = Job(world.flow.setup.job.uri, "query")

    def begin(
        location: Files, sources: Sequence[Source] | None = (TEXT, replace(TEXT, number=1))
    ) -> None:
        begin_query_with(
            saved.uri,
            job,
            location,  # type: ignore[arg-type]
            lambda manifests: checked.append({m.operator for m in manifests}),
            NewQuery(sources=sources),
        )

    checked: list[set[str]] = []
    with pytest.raises(SettingError, match="how many sources"):
        begin(Files(), None)
    other = Files()
    other.data["offsets/0"] = b"of another"
    with pytest.raises(CheckpointLocationError, match="offsets/0"):
        begin(other)
    assert not job.log().sequences()
    location = CutFiles(0)
    for left in range(4):  # cut at each of its files
        location.left = left
        with pytest.raises(KeyboardInterrupt):
            begin(location)
    location.left = 4
    begin(location)
    assert checked == [{"windows"}]
    epoch = saved.epoch
    assert location.data.keys() == {
        "metadata",
        f"commits/{epoch}",
        f"offsets/{epoch}",
        f"offsets/{epoch - 1}",
    }
    lines = location.data[f"offsets/{epoch}"].decode().split("\n")
    assert lines[0] == "v1"
    assert json.loads(lines[1])["conf"] == {}
    assert lines[2:] == ["-", "-"]
    query_id = json.loads(location.data["metadata"])["id"]
    written = [m for m in job.manifests() if m.kind == "checkpoint"]
    assert {m.operator for m in written} == {"windows"}
    assert {m.query_id for m in written} == {query_id}
    assert job.lineages().keys() == {"windows"}


def as_of_a_query(savepoint: Savepoint, job: Job, folder: Path) -> str:
    """The same state as a streaming query leaves it: made into a job's, and saved from there."""
    from recovery.savepoints.create_savepoint import create_savepoint
    from recovery.savepoints.location_files import StoreLocation
    from snapshot.storage.memory_store import MemoryStore
    from statebackend import system

    location, files = MemoryStore(system.new_id()), Files()
    begin_query_with(savepoint, job, files, lambda _: None, NewQuery(sources=[TEXT]))  # type: ignore[arg-type]
    for name, data in files.data.items():
        location.put(name, [data])
    uri = f"file://{folder}"
    making = making_of(job, deadline_of(job, 60.0), uri, location=StoreLocation(location))
    made = create_savepoint(replace(making))
    assert not made.continuous
    return made.uri


def test_windows_go_through_a_query_and_back_into_a_stream(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The watermark, timers and open windows: what is late stays late, no window comes twice."""
    first = windows(world, None, 1000)
    query = world.start(2)
    soon(lambda: len(first.rows()) > 40)
    made = query.stop_with_savepoint()
    fired = [tuple(row.values()) for row in first.rows()]
    uri = as_of_a_query(made, Job(world.flow.setup.job.uri, "query"), tmp_path / "of a query")

    world.renew(job="clone", savepoint=uri)
    second = windows(world, 6000, None)  # from its start: what is behind the watermark is late
    with caplog.at_level(logging.WARNING):
        clone = world.start(3)
    assert "sources begin where they would in a new job" in caplog.text
    assert clone.await_termination(60.0)
    again = [tuple(row.values()) for row in second.rows()]
    found = fired + again
    assert len({row[:2] for row in found}) == len(found)  # no window comes twice
    whole, starts = windows_truth(6000, SIZE_MS), {start for _, start, _, _ in fired}
    assert {row for row in found if row[1] in starts} >= {r for r in whole if r[1] in starts}
    open_then = max(starts) + SIZE_MS
    later = {row for row in again if row[1] > open_then}
    assert later == {row for row in whole if row[1] > open_then}
    world.renew(job="another", savepoint=uri)
    sink = CollectSink()
    keyed = world.source(Numbers(100)).key_by("key")
    keyed.process(Windows(SIZE_MS), uid="other", output_schema=WINDOWS).sink(sink)
    with pytest.raises(MissingUidError, match="'windows'"):
        world.start(2)


def test_a_beginning_that_is_cut_is_repeated(world: World, saved: Savepoint) -> None:
    job = Job(world.flow.setup.job.uri, "cut")

    class Cut(KeyboardInterrupt):
        pass

    def cutting(calls: int) -> Iterator[None]:
        real, left = job.store.create, [calls]

        def create(*args: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Cut
            return real(*args, **named)

        job.store.create = create  # type: ignore[method-assign]
        yield
        job.store.create = real  # type: ignore[method-assign]

    for calls in range(3):
        around = cutting(calls)
        next(around)
        with pytest.raises(Cut):
            begin_with(saved, job, lambda manifests: None)
        next(around, None)
    begin_with(saved, job, lambda manifests: None)
    begin_with(saved, job, lambda manifests: None)  # it has begun
    live = job.lineages()
    assert live.keys() == {"windows", "source"}
    assert {one.last_epoch for one in live.values()} == {saved.epoch}
    assert {m.query_id for m in job.manifests() if m.kind == "checkpoint"} == {CONTINUOUS}


def test_rows_in_flight_are_found_in_a_state() -> None:
    """Those of a source lie in a list of its own, those of an operator beside its lists."""

    def kept(
        uid: str, sequence: int, columns: list[str], name: str, elements: list[bytes]
    ) -> KeptRecord:
        codec = codec_for(ELEMENT)
        stored = tuple(codec.encode((one,)) for one in elements)
        blob = encode_lists({name: StoredList("split", ELEMENT.json(), codec.version, stored)})
        digest = blake3(blob).hexdigest()
        entry = SliceEntry(
            operator=uid,
            subtask=0,
            key_group_start=0,
            key_group_end=7,
            attempt=0,
            kind="operator",
            epoch=4,
            digest=digest,
            chain="",
            size_bytes=len(blob),
            rows=len(elements),
            object=digest,
        )
        blobs[digest] = blob
        fields = [{"name": one, "type": "long"} for one in columns]
        manifest = Manifest(
            kind="checkpoint",
            job="job",
            job_id="id",
            generation=1,
            sequence=sequence,
            writer="w",
            write_id="w",
            oldest_needed=0,
            operator=uid,
            epoch=4,
            schemas={"": json.dumps({"type": "struct", "fields": fields})},
        )
        return KeptRecord(manifest, (Needed(sequence, entry),))

    blobs: dict[str, bytes] = {}
    place, flight = Place("v", 0, 2), Flight()
    flight.add(ChannelQueue("in", "other", 0, 1), [pa.record_batch({"a": [1]})])
    (rows,), at = flight.elements(place), watermark(place, 5000)

    def found(*records: KeptRecord) -> list[str]:
        lineages = {one.manifest.operator: None for one in records}
        state = StateAt(4, records, lineages, {})  # type: ignore[arg-type]
        return overtaken_in(state, lambda one: blobs[one.entry.digest])

    assert found(
        kept("keyed", 1, ["key"], "\0in_flight", [at, rows]),
        kept("source", 2, [], "in_flight", [rows, rows]),
        kept("aligned", 3, ["key"], "\0in_flight", []),
        kept("a user's", 4, ["key"], "in_flight", [b"theirs"]),
        kept("aligned, in event time", 5, ["key"], "\0in_flight", [at]),
    ) == ["keyed", "source"]
    with pytest.raises(CorruptionError, match="'damaged'"):
        found(kept("damaged", 1, ["key"], "\0in_flight", [at[:-20]]))
    newer = msgspec.msgpack.encode([2, *msgspec.msgpack.decode(at)[1:]])
    with pytest.raises(UnsupportedFormatError, match="format 2"):
        found(kept("newer", 1, ["key"], "\0in_flight", [newer]))


def test_a_query_lets_go_of_where_the_watermarks_of_a_continuous_job_stood() -> None:
    """Else its savepoint would bring the watermarks of then to a continuous job."""
    codec = codec_for(ELEMENT)
    declared = StoredList("split", ELEMENT.json(), codec.version, (codec.encode((b"x",)),))
    stored = with_elements(
        StoredOperatorState({"mine": declared}), [watermark(Place("v", 0, 2), 5)]
    )
    assert len(stored.lists) == 2
    for parallelism in (2, 3):
        lists = redistribute([stored.lists] * 2, parallelism, 0)
        held = HeldOperatorState(StoredOperatorState(lists))
        assert held.snapshot().lists is None  # nothing is declared: nothing goes into the record
        held.hold("mine", "split", codec, None, ELEMENT.json(), "")
        made = held.snapshot()
        assert made.lists is not None
        assert decode_lists(made.lists).keys() == {"mine"}


def stopped_in_event_time(world: World) -> tuple[list[tuple[Any, ...]], Savepoint]:
    """A job whose barriers may overtake, stopped without a savepoint; none has overtaken rows."""
    sink = windows(world, None, 1000)
    query = world.start(2, alignment_timeout_s=20.0)
    soon(lambda: len(sink.rows()) > 40)
    assert query.stop()
    made = query.savepoint()
    state = open_savepoint(made, world.flow.setup.job).state()
    entries = [one.entry for kept in state.records for one in kept.slices]
    assert {one.operator for one in entries if one.kind == "operator"} >= {"windows"}
    return [tuple(row.values()) for row in sink.rows()], made


@pytest.mark.parametrize("parallelism", [2, 3])
def test_a_stopped_job_in_event_time_whose_barriers_may_overtake_can_be_saved(
    world: World, parallelism: int
) -> None:
    fired, made = stopped_in_event_time(world)
    world.renew(job="clone", savepoint=made.uri)
    second = windows(world, 6000, None)
    assert world.start(parallelism, alignment_timeout_s=20.0).await_termination(60.0)
    found = {tuple(row.values()) for row in second.rows()} | set(fired)
    assert found == windows_truth(6000, SIZE_MS)


def test_where_its_watermarks_stood_does_no_harm_on_the_way_through_a_query(
    world: World, tmp_path: Path
) -> None:
    fired, made = stopped_in_event_time(world)
    uri = as_of_a_query(made, Job(world.flow.setup.job.uri, "query"), tmp_path / "of a query")
    world.renew(job="clone", savepoint=uri)
    second = windows(world, 6000, None)
    assert world.start(2).await_termination(60.0)
    again = [tuple(row.values()) for row in second.rows()]
    open_then = max(start for _, start, _, _ in fired) + 2 * SIZE_MS
    whole = windows_truth(6000, SIZE_MS)
    assert {row for row in again if row[1] > open_then} == {r for r in whole if r[1] > open_then}
    at_ms = (
        manifests_of(open_savepoint(uri, world.flow.setup.job).state())["windows"].event_max_ms or 0
    )
    assert min(start for _, start, _, _ in again) + SIZE_MS > at_ms  # what was late still is


def test_nothing_is_read_behind_the_barrier_with_which_a_job_stops(world: World) -> None:
    """So not even a sink that takes rows at once sees one twice."""
    seen: list[int] = []
    for last in (False, True):
        per_s = None if last else 400
        stream = world.source(Numbers(4000, splits=3, rows_per_s=per_s, clock=world.held(1.0)))
        stream.sink(CallbackSink(lambda rows, context: seen.extend(rows["value"].to_pylist())))
        query = world.start(2)
        if last:
            assert query.await_termination(60.0)
        else:
            soon(lambda query=query: query.epoch is not None and seen)
            made = query.stop_with_savepoint()
            world.renew(job="clone", savepoint=made.uri)
    assert sorted(seen) == list(range(4000))
