"""Where a row's nanoseconds go in our task, without Spark: `python -m bench profile`.

Four looks, three of them at the same work, the counter over keys that are all there already:

* *phases*: what the task itself reports with its ack;
* *points*: every function that runs once an epoch, a chunk or a batch, traced where it is called;
* *ladder*: the loop that calls the processor, taken apart by processors that each do one thing more
  than the one before. A profiler's own cost would drown calls this small;
* *states*: what one access to each kind of state costs, and a timer.

Processor time is the figure to compare by: it hardly depends on what else the machine does. Work on
other threads (RocksDB's flush) and waiting are in the wall time only.
"""

from __future__ import annotations

import cProfile
import gc
import io
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row

from bench.inproc import INPUT, OUTPUT, STATE, UID, Harness, spark_batches
from bench.layers import PHASES
from bench.processor import Counter
from bench.profile_states import state_costs
from bench.trace import Tracer
from statebackend.operators.declared_states import EpochState, EpochTimes, StateDeclaration
from statebackend.operators.input.group_by_key import Groups, group_rows
from statebackend.operators.per_key_loop import KeyOperator
from statebackend.operators.rows.row_reader import RowReader
from statebackend.operators.rows.row_writer import RowWriter
from statebackend.operators.stateful_processor_calls import TwsCalls
from statebackend.rocks.store import Marker, RocksStore
from statebackend.schema.codec import codec_for
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.spark.worker.epoch_input import InputShape, read_epoch
from statebackend.state.cells import KeyCursor
from statebackend.state.table import StateTable

__all__ = ["ladder", "profile", "profile_text"]

TARGETS = (
    "statebackend.spark.worker.task:read_epoch",
    "statebackend.spark.worker.epoch_input:_Reader.take",
    "statebackend.schema.keys.key_codec:KeyCodec.encode_arrow",
    "statebackend.spark.worker.epoch_input:group_part",
    "recovery.restore.restorer:Restorer.open",
    "recovery.local.local_copies:LocalSubtask.acquire",
    "recovery.local.local_copies:LocalSubtask.sweep",
    "recovery.local.local_copies:StoreDirectory.describe",
    "recovery.local.local_copies:StoreDirectory.drop_deltas",
    "recovery.local.local_copies:StoreDirectory.read_delta",
    "recovery.local.local_copies:StoreDirectory.write_delta",
    "recovery.restore.restorer:Restorer._apply",
    "statebackend.rocks.store:RocksStore.open",
    "statebackend.rocks.store:RocksStore.multi_get",
    "statebackend.rocks.store:RocksStore.apply",
    "statebackend.rocks.store:RocksStore.apply_batches",
    "statebackend.rocks.store:RocksStore.close",
    "statebackend.operators.rows.row_reader:columns_to_python",
    "statebackend.state.cells:KeyCursor.load",
    "statebackend.operators.rows.row_writer:RowWriter.take",
    "statebackend.state.table:FrozenOverlay.sorted",
    "statebackend.spark.worker.task:encode_frozen",
    "recovery.local.local_copies:LocalSubtask.give_back",
    "snapshot.storage.local_store:LocalStore.put",
    "snapshot.log.commit_log:CommitLog.append",
    "bench.inproc:_Client.begin",
    "bench.inproc:_Client.ack",
)
_WARM_EPOCHS = 3
_STATE_KEYS = 2000  # each with a map and a list


def profile(*, keys: int, repeats: int, top: int = 0) -> dict[str, Any]:
    """All looks at epochs of ``keys`` keys, one row each (the states: of fewer).

    Args:
        top: also the ``top`` functions by their own time, of one epoch under cProfile.
    """
    with tempfile.TemporaryDirectory(prefix="bench-profile-") as name:
        folder = Path(name)
        plain = _epochs(folder / "plain", keys, repeats)
        traced = _traced_epochs(folder / "traced", keys, repeats)
        rungs = ladder(folder / "ladder", keys=keys, repeats=repeats)
        found = {"keys": keys, "repeats": repeats, **plain, **traced, "ladder": rungs}
        found["states"] = _states(folder / "states", min(keys, _STATE_KEYS), repeats)
        if top:
            found["cprofile"] = _cprofile(folder / "cprofile", keys, top)
    return found


def _harness(folder: Path, keys: int) -> Harness:
    folder.mkdir()
    harness = Harness(folder, keys=keys)
    for _ in range(_WARM_EPOCHS):
        harness.run(harness.rows())
    return harness


def _epochs(folder: Path, keys: int, repeats: int) -> dict[str, Any]:
    harness = _harness(folder, keys)
    phases: dict[str, list[float]] = {}
    wall, cpu = [], []
    for _ in range(repeats):
        batches = harness.rows()
        gc.collect()
        start, start_cpu = time.perf_counter_ns(), time.thread_time_ns()
        rows = harness.run(batches)
        cpu.append(time.thread_time_ns() - start_cpu)
        wall.append(time.perf_counter_ns() - start)
        assert rows == keys, rows
        for phase, took_ms in harness.timings_ms().items():
            phases.setdefault(phase, []).append(took_ms)
    order = [phase for phase in PHASES if phase in phases]
    order += sorted(set(phases) - set(order))
    return {
        "epoch_ns_per_row": round(statistics.median(wall) / keys, 1),
        "epoch_cpu_ns_per_row": round(statistics.median(cpu) / keys, 1),
        "phases_ms": {phase: round(statistics.median(phases[phase]), 3) for phase in order},
    }


def _traced_epochs(folder: Path, keys: int, repeats: int) -> dict[str, Any]:
    harness = _harness(folder, keys)
    runs: list[Tracer] = []
    for _ in range(repeats):
        batches = harness.rows()
        gc.collect()
        tracer = Tracer()
        with tracer.patched(TARGETS), tracer.span("(the task itself)"):
            harness.run(batches)
        runs.append(tracer)
    names = {name for run in runs for name in run.points}
    points = []
    for name in names:
        seen = [run.points[name] for run in runs if name in run.points]
        points.append(
            {
                "name": name,
                "calls": statistics.median(p.calls for p in seen),
                "own_ns_per_row": round(statistics.median(p.own_wall for p in seen) / keys, 1),
                "own_cpu_ns_per_row": round(statistics.median(p.own_cpu for p in seen) / keys, 1),
                "ns_per_row": round(statistics.median(p.wall for p in seen) / keys, 1),
            }
        )
    points.sort(key=lambda point: -float(str(point["own_ns_per_row"])))
    return {"points": points, "not_found": runs[0].missing}


# --- the ladder --------------------------------------------------------------------------------


class _Rung(StatefulProcessor):
    """The counter, up to a certain step."""

    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", STATE)

    def close(self) -> None:
        pass


class _Consumes(_Rung):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        sum(1 for _ in rows)
        yield from ()


class _Gets(_Rung):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        count = sum(1 for _ in rows)
        old = self._count.get()
        if old is not None:
            count += old[0]
        yield from ()


class _Updates(_Rung):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        count = sum(1 for _ in rows)
        old = self._count.get()
        if old is not None:
            count += old[0]
        self._count.update((count,))
        yield from ()


class _NoState:
    """State that costs nothing, for what the processor costs by itself."""

    def getValueState(self, name: str, schema: Any) -> _NoState:
        return self

    def get(self) -> tuple[int]:
        return (1,)

    def update(self, row: tuple[int]) -> None:
        pass


def ladder(folder: Path, *, keys: int, repeats: int) -> list[dict[str, Any]]:
    """The loop over keys, step by step; each rung's cost is what it adds to the one before.

    The fastest of the repeats counts: whatever disturbs a run only ever adds. Without the cyclic
    garbage collector.
    """
    folder.mkdir()
    groups, store = _prepare(folder, keys)
    rungs: list[tuple[str, Callable[[], None]]] = [
        ("loop: Arrow to rows, one call that does nothing", lambda: _bare(groups)),
        ("state loaded by the chunk (multi-get)", lambda: _loaded(groups, store)),
        ("processor called, consumes its rows", lambda: _driven(groups, store, _Consumes())),
        ("ValueState.get", lambda: _driven(groups, store, _Gets())),
        ("ValueState.update", lambda: _driven(groups, store, _Updates())),
        ("output: Row made, rows to Arrow", lambda: _driven(groups, store, Counter())),
    ]
    alone = ("(of it the user's own code, on state that costs nothing)", lambda: _alone(groups))
    best: dict[str, int] = {}
    for _ in range(repeats):
        for name, run in [*rungs, alone]:
            gc.collect()
            gc.disable()  # its turns would fall on whichever rung is running
            start = time.thread_time_ns()
            run()
            best[name] = min(best.get(name, 1 << 62), time.thread_time_ns() - start)
            gc.enable()
    store.close()
    found, below = [], 0
    for name, _ in rungs:
        found.append({"step": name, "cpu_ns_per_row": round((best[name] - below) / keys, 1)})
        below = best[name]
    found.append({"step": "sum", "cpu_ns_per_row": round(below / keys, 1)})
    found.append({"step": alone[0], "cpu_ns_per_row": round(best[alone[0]] / keys, 1)})
    return found


def _prepare(folder: Path, keys: int) -> tuple[Groups, RocksStore]:
    harness = Harness(folder, keys=keys)
    codec = KeyCodec(INPUT[:1])
    schema = pa.schema([pa.field("k", pa.int64()), pa.field("v", pa.int64())])
    shape = InputShape(UID, schema, (0,), 1, harness.spec.max_parallelism)
    taken = read_epoch(harness.rows(), shape)
    encoded = codec.encode_arrow([taken.rows.column(0).combine_chunks()])
    groups = group_rows(taken.rows, encoded, taken.key_groups)
    value = codec_for(STATE).encode((7,))
    full = [
        group + b"\x00\x01" + key for group, key in zip(groups.key_groups, groups.keys, strict=True)
    ]
    marker = Marker(
        job_id="", operator=UID, key_group_start=0, key_group_end=127, epoch=0, chain=""
    )
    store = RocksStore.open(str(folder / "db"))
    store.apply(full, [value] * len(full), marker)
    store.close()
    return groups, RocksStore.open(str(folder / "db"))


def _states(folder: Path, keys: int, repeats: int) -> list[dict[str, Any]]:
    folder.mkdir()
    groups, store = _prepare(folder, keys)
    store.close()
    return state_costs(folder, groups, repeats=repeats)


def _operator(cursor: KeyCursor) -> KeyOperator:
    return KeyOperator(
        uid=UID,
        cursor=cursor,
        reader=RowReader(INPUT, (0,), timezone="UTC"),
        writer=RowWriter(OUTPUT, lambda: "The processor"),
    )


def _bare(groups: Groups) -> None:
    for _ in _operator(KeyCursor()).run(groups, lambda key, rows: None):
        pass


def _calls(cursor: KeyCursor, store: RocksStore, processor: StatefulProcessor) -> TwsCalls:
    declared = StateDeclaration(name="count", kind="value", value_schema=STATE.json())
    state = EpochState(
        cursor,
        StateTable(store),
        declared={"count": declared},
        ids={"count": 1},
        times=EpochTimes(),
    )
    return TwsCalls(processor, UID, state)


def _loaded(groups: Groups, store: RocksStore) -> None:
    cursor = KeyCursor()
    _calls(cursor, store, _Consumes())
    for _ in _operator(cursor).run(groups, lambda key, rows: None):
        pass


def _driven(groups: Groups, store: RocksStore, processor: StatefulProcessor) -> None:
    cursor = KeyCursor()
    for _ in _operator(cursor).run(groups, _calls(cursor, store, processor).rows):
        pass


def _alone(groups: Groups) -> None:
    processor = Counter()
    processor.init(_NoState())  # type: ignore[arg-type]
    handle, row = processor.handleInputRows, Row(k=1, v=1)
    out: list[Row] = []
    for key in range(len(groups)):
        out.extend(handle((key,), iter((row,)), None))


# --- the interpreter's own profiler ------------------------------------------------------------


def _cprofile(folder: Path, keys: int, top: int) -> str:
    harness = _harness(folder, keys)
    batches = spark_batches(harness._keys.copy(), harness.epoch)
    profiler = cProfile.Profile()
    profiler.enable()
    harness.run(batches)
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(top)
    return text.getvalue()


def profile_text(found: dict[str, Any]) -> str:
    """The profile as a table to read."""
    keys = found["keys"]
    lines = [
        f"One epoch of {keys:,} keys, one row each, one subtask, no Spark "
        f"({found['repeats']} repeats, medians):",
        f"  {found['epoch_ns_per_row']:,.0f} ns a row wall, "
        f"{found['epoch_cpu_ns_per_row']:,.0f} ns of it on the task's own thread",
        "",
        f"{'phase':<58}{'ms':>9}{'ns/row':>9}",
    ]
    for phase, took_ms in found["phases_ms"].items():
        lines.append(f"{phase:<58}{took_ms:>9.1f}{took_ms * 1e6 / keys:>9.0f}")
    lines += ["", f"{'point (own time)':<49}{'calls':>9}{'ns/row':>9}{'cpu':>9}"]
    for point in found["points"]:
        if point["own_ns_per_row"] >= 1:
            lines.append(
                f"{point['name']:<49}{point['calls']:>9.0f}"
                f"{point['own_ns_per_row']:>9.0f}{point['own_cpu_ns_per_row']:>9.0f}"
            )
    lines += ["", f"{'loop over keys, step by step':<67}{'cpu ns/row':>10}"]
    lines += [f"{rung['step']:<67}{rung['cpu_ns_per_row']:>10.0f}" for rung in found["ladder"]]
    lines += ["", f"{'an access to state, and what it adds to a row':<67}{'cpu ns/row':>10}"]
    lines += [f"{case['step']:<67}{case['cpu_ns_per_row']:>10.0f}" for case in found["states"]]
    if found["not_found"]:
        lines += ["", f"not traced (not there any more): {', '.join(found['not_found'])}"]
    if "cprofile" in found:
        lines += ["", found["cprofile"]]
    return "\n".join(lines)
