"""Large constants of a processor reach the workers once, through Spark's own broadcasts."""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.cloudpickle import register_pickle_by_value, unregister_pickle_by_value

from statebackend.errors import ProcessorError
from statebackend.runtime.worker.shipped_constants import pack, sent_by
from tests.spark.local.processors import Ledger
from tests.spark.local.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from statebackend.runtime.worker.shipped_processor import ShippedProcessor

LIMIT = 100_000
SEEN = "pid long, entries long, fields long, array_sum long, shared string"


@pytest.fixture(autouse=True)
def this_module_travels_by_value() -> Iterator[None]:
    register_pickle_by_value(sys.modules[__name__])
    yield
    unregister_pickle_by_value(sys.modules[__name__])


def note_load(path: str) -> str:
    """Called whenever the constant is unpickled, in whichever process that is."""
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    return "loaded"


class Noted:
    """An entry that leaves a note when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return note_load, (str(self.path),)


class Scorer(Ledger):
    """A ledger that looks things up."""

    def __init__(self, notes: Path, shared: Any = None) -> None:
        self.table = {index: f"customer {index}" for index in range(20_000)}
        self.table[-1] = Noted(notes)  # type: ignore[assignment]
        self.array = np.arange(50_000)
        self.fields: list[int] = []
        self.shared = shared

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        self.fields.append(1)
        assert self.table[7] == "customer 7"
        assert int(self.array[-1]) == 49_999
        yield from super().handleInputRows(key, rows, timerValues)


class WriterToTable(Scorer):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        self.table[key[0]] = "changed"
        yield from super().handleInputRows(key, rows, timerValues)


class WriterToCounter(Ledger):
    def __init__(self) -> None:
        self.counter = Counter({index: index for index in range(50_000)})

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        self.counter[key[0]] += 1
        yield from super().handleInputRows(key, rows, timerValues)


def looking(shipped: ShippedProcessor) -> Callable[..., Iterator[pa.RecordBatch]]:
    """A task that takes a processor, changes its field, and says what it saw."""

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        made = shipped.fresh()
        made.fields.append(1)
        seen = {
            "pid": os.getpid(),
            "entries": len(made.table),
            "fields": len(made.fields),
            "array_sum": int(made.array.sum()),
            "shared": made.shared.value if made.shared else None,
        }
        yield pa.RecordBatch.from_pylist([seen])

    return task


def shipped_by(spark: SparkSession, made: Any) -> ShippedProcessor:
    context = spark.sparkContext
    return pack(made, uid="op", limit_bytes=LIMIT).ship(context.broadcast, sent_by(context))


def loads(notes: Path) -> dict[str, int]:
    """How often each process unpickled the constant."""
    return dict(Counter(notes.read_text().split()))


def test_a_constant_is_loaded_once_in_a_worker_process_whatever_it_runs(
    spark: SparkSession, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    shipped = shipped_by(spark, Scorer(notes))
    assert [part.name for part in shipped.parts] == ["self.table", "self.array"]
    for _ in range(3):
        rows = spark.range(0, 8, 1, 8).mapInArrow(looking(shipped), SEEN).collect()
        assert [(row.entries, row.fields) for row in rows] == [(20_001, 1)] * 8
        assert {row.array_sum for row in rows} == {49_999 * 25_000}
    counts = loads(notes)
    assert set(counts.values()) == {1}
    # The same content by a broadcast of another: nothing is loaded again in the same processes.
    sent_by(spark.sparkContext).clear()
    again = shipped_by(spark, Scorer(notes))
    assert again.parts[0].broadcast is not shipped.parts[0].broadcast
    rows = spark.range(0, 8, 1, 8).mapInArrow(looking(again), SEEN).collect()
    assert set(loads(notes).values()) == {1}
    assert {str(row.pid) for row in rows} <= set(loads(notes))


def test_a_constant_is_broadcast_once_however_many_processors_have_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    first = shipped_by(spark, Scorer(tmp_path / "notes"))
    second = shipped_by(spark, Scorer(tmp_path / "notes"))
    assert all(a.broadcast is b.broadcast for a, b in zip(first.parts, second.parts, strict=True))


def test_a_processor_may_hold_broadcasts_of_its_own(spark: SparkSession, tmp_path: Path) -> None:
    own = spark.sparkContext.broadcast("of the user")
    packed = pack(Scorer(tmp_path / "notes", own), uid="op", limit_bytes=LIMIT)
    assert packed.rehearsal().shared is own
    shipped = packed.ship(spark.sparkContext.broadcast)
    (row,) = spark.range(0, 1, 1, 1).mapInArrow(looking(shipped), SEEN).collect()
    assert row.shared == "of the user"


# --- through the backend -------------------------------------------------------------------------


def backend_of(world: World) -> Any:
    return world.backend(settings={"constant_bytes": LIMIT})


def test_a_query_loads_a_constant_once_in_a_worker_and_its_results_are_exact(
    world: World, tmp_path: Path
) -> None:
    world.input.add_batches(4)
    backend = backend_of(world)
    frame = world.ledger(backend, processor=Scorer(tmp_path / "notes"))
    world.run(backend, frame)
    world.check(backend)
    assert set(loads(tmp_path / "notes").values()) == {1}


def test_a_query_that_writes_to_a_constant_fails_at_the_users_line(
    world: World, tmp_path: Path
) -> None:
    world.input.add_batches(1)
    backend = backend_of(world)
    text = world.fail(backend, world.ledger(backend, processor=WriterToTable(tmp_path / "n")))
    assert "self.table is a large constant" in text
    assert "test_constants.py" in text
    assert ProcessorError.code in text


def test_a_query_that_changes_a_constants_size_fails_at_the_end_of_the_epoch(
    world: World,
) -> None:
    world.input.add_batches(1)
    backend = backend_of(world)
    text = world.fail(backend, world.ledger(backend, processor=WriterToCounter()))
    assert "changed self.counter, a large constant" in text


def test_with_the_setting_off_every_epoch_has_its_own(world: World, tmp_path: Path) -> None:
    world.input.add_batches(2)
    backend = world.backend(settings={"constant_bytes": 0})
    world.run(backend, world.ledger(backend, processor=WriterToTable(tmp_path / "notes")))
    world.check(backend)
