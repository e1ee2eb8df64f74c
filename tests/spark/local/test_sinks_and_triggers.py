"""Every built-in sink takes a stateful frame, under every trigger, and each row counts once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.cloudpickle import register_pickle_by_value
from pyspark.sql import functions as F
from pyspark.sql.types import Row

from statebackend import KeyedProcessor
from tests.spark.local.world import durable_state, finish, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from statebackend import ProcessorContext, StateBackend
    from tests.spark.local.world import World

register_pickle_by_value(sys.modules[__name__])  # workers need not find this module

FILES = ("parquet", "json", "csv", "orc", "text")
PLAIN = ("memory", "noop", "console")
Counts = list[tuple[str, int, int]]


def _batches(world: World) -> list[list[dict[str, Any]]]:
    """The rows of each input file."""
    paths = sorted(world.input.folder.glob("*.json"))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def _truth(batches: list[list[dict[str, Any]]]) -> Counts:
    """What a ledger gives for these batches, in any order."""
    ids: dict[str, list[int]] = {}
    found = []
    for rows in batches:
        for row in rows:
            ids.setdefault(row["k"], []).append(row["id"])
        found += [(k, len(ids[k]), sum(ids[k])) for k in sorted({row["k"] for row in rows})]
    return sorted(found)


class ForeachWriter:
    """A file for each partition and epoch, whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def open(self, partition_id: int, epoch_id: int) -> bool:
        self.name, self.rows = f"{epoch_id}-{partition_id}", []
        return True

    def process(self, row: Row) -> None:
        self.rows.append(list(row))

    def close(self, error: Exception | None) -> None:
        if error is None:
            Path(self.folder, self.name).write_text(json.dumps(self.rows))


def _shaped(world: World, frame: DataFrame, sink: str) -> DataFrame:
    if sink == "text":
        return frame.select(F.concat_ws(",", "k", "n", "total").alias("value"))
    return frame.select("k", "n", "total")


def _table(world: World) -> str:
    return "t_" + "".join(c if c.isalnum() else "_" for c in world.root.parent.name)


def _into(world: World, writer: DataStreamWriter, sink: str) -> DataStreamWriter:
    """The writer with its sink; ``toTable`` is told at the start."""
    writer = writer.outputMode("append").option("checkpointLocation", str(world.location))
    out = world.root / "out"
    if sink in FILES:
        return writer.format(sink).option("path", str(out))
    if sink in PLAIN:
        return writer.format(sink).queryName(_table(world))
    if sink == "foreach":
        return writer.foreach(ForeachWriter(out))
    if sink == "foreachBatch":
        return writer.foreachBatch(world.sink)
    return writer


def _started(
    world: World, backend: StateBackend, sink: str, trigger: dict[str, Any]
) -> StreamingQuery:
    frame = _shaped(world, world.ledger(backend), sink)
    writer = _into(world, frame.writeStream, sink).trigger(**trigger)
    if sink != "toTable":
        return backend.start(writer)
    with backend.starting(checkpoint_location=str(world.location)):
        query = writer.toTable(_table(world))
    return query


def _taken(world: World, sink: str) -> Counts | None:
    """What the sink holds; None for one that keeps nothing."""
    out, columns = str(world.root / "out"), "k string, n bigint, total bigint"
    if sink == "text":
        lines = [row.value.split(",") for row in world.spark.read.text(out).collect()]
        return sorted((k, int(n), int(total)) for k, n, total in lines)
    if sink in FILES:
        rows = world.spark.read.schema(columns).format(sink).load(out).collect()
    elif sink in ("memory", "toTable"):
        rows = world.spark.table(_table(world)).collect()
    elif sink == "foreach":
        rows = [row for path in Path(out).iterdir() for row in json.loads(path.read_text())]
    elif sink == "foreachBatch":
        return sorted((row["k"], row["n"], row["total"]) for row in world.sink.rows())
    else:
        return None
    return sorted(tuple(row) for row in rows)


def _check_state(world: World, backend: StateBackend) -> None:
    wanted = {(k,): (len(ids), sum(ids)) for k, ids in world.input.ids().items()}
    assert durable_state(backend, "ledger")["acc"] == wanted
    assert backend.lineages()["ledger"].last_epoch == world.committed()[-1]


@pytest.fixture
def table(world: World) -> Iterator[None]:
    """Tables and views of a test are gone after it."""
    yield
    world.spark.sql(f"DROP TABLE IF EXISTS {_table(world)}")
    world.spark.catalog.dropTempView(_table(world))


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("sink", [*FILES, *PLAIN, "foreach", "foreachBatch", "toTable"])
def test_every_sink_gets_each_row_once(world: World, sink: str) -> None:
    world.input.add_batches(2, keys=4, rows=8)
    backend = world.backend()
    finish(_started(world, backend, sink, {"availableNow": True}))
    assert world.committed() == [0, 1]
    _check_state(world, backend)
    taken = _taken(world, sink)
    assert taken in (None, _truth(_batches(world)))


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("sink", ["parquet", "foreach", "toTable"])
def test_a_sink_goes_on_after_a_restart(world: World, sink: str) -> None:
    for _ in range(2):
        world.input.add_batches(1, keys=4, rows=8)
        backend = world.backend()
        finish(_started(world, backend, sink, {"availableNow": True}))
    assert world.committed() == [0, 1]
    _check_state(world, backend)
    assert _taken(world, sink) == _truth(_batches(world))


@pytest.mark.parametrize("sink", ["parquet", "memory", "foreachBatch"])
@pytest.mark.filterwarnings("ignore:.*Trigger.Once.*")
@pytest.mark.usefixtures("table")
def test_a_trigger_that_runs_once_takes_all_files_in_one_batch(world: World, sink: str) -> None:
    world.input.add_batches(2, keys=4, rows=8)
    backend = world.backend()
    finish(_started(world, backend, sink, {"once": True}))
    assert world.committed() == [0]
    _check_state(world, backend)
    everything = [row for rows in _batches(world) for row in rows]
    assert _taken(world, sink) == _truth([everything])


@pytest.mark.parametrize("sink", ["parquet", "memory", "toTable", "foreachBatch"])
@pytest.mark.usefixtures("table")
def test_a_trigger_by_time_takes_what_comes_while_it_runs(world: World, sink: str) -> None:
    world.input.add_batches(1, keys=4, rows=8)
    backend = world.backend()
    query = _started(world, backend, sink, {"processingTime": "50 milliseconds"})
    for batch in range(2):
        until(lambda batch=batch: batch in world.committed() or query.exception(), "a commit")
        if batch == 0:
            world.input.add_batches(1, keys=4, rows=8)
    query.stop()
    assert query.exception() is None
    assert world.committed() == [0, 1]
    _check_state(world, backend)
    assert _taken(world, sink) == _truth(_batches(world))


@pytest.mark.parametrize("sink", ["memory", "noop", "foreachBatch"])
@pytest.mark.usefixtures("table")
def test_a_sink_that_needs_no_location_may_go_without_one(world: World, sink: str) -> None:
    world.input.add_batches(2, keys=4, rows=8)
    backend = world.backend()
    writer = _shaped(world, world.ledger(backend), sink).writeStream.trigger(availableNow=True)
    if sink == "foreachBatch":
        writer = writer.foreachBatch(world.sink)
    else:
        writer = writer.format(sink).queryName(_table(world))
    finish(backend.start(writer))
    wanted = {(k,): (len(ids), sum(ids)) for k, ids in world.input.ids().items()}
    assert durable_state(backend, "ledger")["acc"] == wanted
    assert _taken(world, sink) in (None, _truth(_batches(world)))


# --- sinks, and batches that only timers ask for ------------------------------------------------


class Reminder(KeyedProcessor):
    """Passes ids on when their event time has come."""

    def open(self, ctx: ProcessorContext) -> None:
        self.held = ctx.map_state("held", "at_ms bigint", "id bigint")

    def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
        for row in rows:
            at_ms = round(row.at.timestamp() * 1000)
            self.held.update_value((at_ms,), (row.id,))
            ctx.timers.register(at_ms)

    def on_timer(self, key: Any, at_ms: int, ctx: ProcessorContext) -> Iterator[Any]:
        (number,) = self.held.get_value((at_ms,))
        self.held.remove_key((at_ms,))
        yield (*key, number, at_ms)


def _timed(world: World, backend: StateBackend) -> DataFrame:
    return backend.process(
        world.input.stream(world.spark),
        keys="k",
        processor=Reminder(),
        output_schema="k string, n bigint, total bigint",
        uid="reminder",
        time_mode="event",
        event_time="at",
        watermark_delay="1 second",
    )


@pytest.mark.parametrize("sink", ["parquet", "foreach", "toTable"])
@pytest.mark.usefixtures("table")
def test_timers_fire_into_every_kind_of_sink_also_after_the_last_data(
    world: World, sink: str
) -> None:
    world.input.schema = "k string, id bigint, at timestamp"
    truth, last_s = [], 0
    for start in range(2):  # the second one begins with a batch that has timers due
        rows = [
            {"k": f"k{i % 3}", "id": 10 * start + i, "at": f"2026-01-01 00:00:{start * 20 + i:02}"}
            for i in range(10)
        ]
        world.input.add(rows)
        last_s = start * 20 + 9
        backend = world.backend()
        writer = _into(world, _timed(world, backend).writeStream, sink).trigger(availableNow=True)
        if sink == "toTable":
            with backend.starting(checkpoint_location=str(world.location)):
                query = writer.toTable(_table(world))
        else:
            query = backend.start(writer)
        finish(query)
        base_ms = 1_767_225_600_000
        at = {row["id"]: base_ms + 1000 * int(row["at"][-2:]) for row in world.input.rows}
        truth = sorted(
            (row["k"], row["id"], at[row["id"]])
            for row in world.input.rows
            if at[row["id"]] <= base_ms + 1000 * (last_s - 1)
        )
        assert _taken(world, sink) == truth
