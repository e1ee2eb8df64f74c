"""Event time of several operators, over restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from recovery.decide.restart_strategy import FixedDelay
from statebackend.continuous.sinks.collect_sink import CollectSink
from statebackend.schema.types import arrow_schema
from tests.continuous.runtime.jobs import KEYS, HeldClock, Numbers, Windows
from tests.continuous.runtime.world import soon

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.continuous.runtime.world import World

pytestmark = pytest.mark.full  # whole jobs and restarts

WINDOW_MS = 100
BACK_MS = 50_000
OUTPUT = "key BIGINT, start BIGINT, n BIGINT, total BIGINT"


class Late(Numbers):
    """As `Numbers` from a time on, but that every second row comes far too late, if it is ``late``:
    but for the first ones, which come before there is a watermark."""

    def __init__(self, rows: int, first_ms: int, *, late: bool, clock: HeldClock) -> None:
        super().__init__(rows, rows_per_s=400, event_time="at", watermark_delay="5 ms", clock=clock)
        self._first_ms, self._late = first_ms, late

    def batch(self, numbers: NDArray[np.int64]) -> pa.RecordBatch:
        late = self._late & (numbers % 4 < 2) & (numbers >= 400)
        at_ms = self._first_ms + numbers - BACK_MS * late
        columns = [numbers * 7 % KEYS, numbers, at_ms * 1000]
        schema = arrow_schema(self.schema)
        return pa.RecordBatch.from_arrays(
            [
                pa.array(column).cast(pa.timestamp("us", "UTC")).cast(field.type)
                if pa.types.is_timestamp(field.type)
                else pa.array(column)
                for column, field in zip(columns, schema, strict=True)
            ],
            schema=schema,
        )


def windows_of(rows: int, first_ms: int, *, late: bool) -> set[tuple[int, int, int, int]]:
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for i in range(rows):
        if late and i % 4 < 2 and i >= 400:
            continue
        at = (i * 7 % KEYS, (first_ms + i) // WINDOW_MS * WINDOW_MS)
        n, total = found.get(at, (0, 0))
        found[at] = n + 1, total + i
    return {(*at, *sums) for at, sums in found.items()}


def test_after_a_restart_each_operator_goes_on_from_its_own_watermark(world: World) -> None:
    """One is far ahead of the other: what is late there must stay late, and fire no window again.

    With the job's smallest watermark its late rows would count until its inputs had said theirs.
    """
    rows, ahead_ms, behind_ms = 4000, 10_000_000, 1_000_000
    sinks: dict[str, CollectSink] = {}
    for name, first_ms, late in (("ahead", ahead_ms, True), ("behind", behind_ms, False)):
        source = Late(rows, first_ms, late=late, clock=world.held(0.5))
        stream = world.source(source, name).key_by("key")
        sinks[name] = CollectSink()
        stream.process(
            Windows(WINDOW_MS),
            uid=f"windows-{name}",
            output_schema=OUTPUT,
            time_mode="event",
            event_time="at",
        ).sink(sinks[name])
    query: Any = world.start(2, restart=FixedDelay(5, 0.0))
    # Every subtask has a watermark, and no late row.
    soon(lambda: all(len(sink.rows()) >= KEYS for sink in sinks.values()))
    world.cluster.slots[-1]._link.broken("drawn", 0, RuntimeError("drawn"))
    soon(lambda: query.restarts == 1)
    world.go_on()
    assert query.await_termination(60.0)
    assert query.restarts == 1
    found = {name: [tuple(row.values()) for row in sink.rows()] for name, sink in sinks.items()}
    assert sorted(found["ahead"]) == sorted(windows_of(rows, ahead_ms, late=True))
    assert sorted(found["behind"]) == sorted(windows_of(rows, behind_ms, late=False))
