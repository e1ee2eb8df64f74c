"""`StateBackend.lookup` of a continuous job: after the newest complete checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

from statebackend.continuous.sinks.file_sink import FileSink
from statebackend.tables import state_lookup as lookup
from tests.continuous.runtime.jobs import OUTPUT, Counting, Numbers
from tests.continuous.runtime.world import soon

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from statebackend.backend import StateBackend


def test_open_stores_of_a_continuous_job_answer(
    backend: Callable[[], StateBackend], tmp_path: Path
) -> None:
    made = backend()
    keyed = made.continuous(Numbers(None, rows_per_s=500.0), name="numbers").key_by("key")
    counted = keyed.process(Counting(), uid="count", output_schema=OUTPUT)
    flow = counted.sink(FileSink(tmp_path / "out"))
    query = flow.start(parallelism=2, checkpoint_interval=0.3)
    try:
        soon(lambda: query.is_running and (query.epoch or 0) >= 2, 120.0)
        found: list[Any] = []

        def from_workers() -> bool:
            with mock.patch.object(lookup, "fetch_subtask", wraps=lookup.fetch_subtask) as fetched:
                found.append(made.lookup_all("count", "counts", [0, 1, 2, 3, -1]))
                return not fetched.call_count

        soon(from_workers, 60.0)
        before = found[-1]
        assert before[-1] is None
        assert all(row.n > 0 for row in before[:-1])
        soon(lambda: made.lookup("count", "counts", 0).n > before[0].n, 60.0)
    finally:
        query.stop()
    # What is confirmed is what a start goes on from, and it does not fall behind.
    after = made.lookup_all("count", "counts", [0, 1, 2, 3])
    assert after[0].n >= before[0].n
    # Another key's state stays what it is when one is erased, and the job goes on.
    made.erase("count", [0])
    assert made.lookup_all("count", "counts", [0, 1, 2, 3]) == [None, *after[1:]]
    query = flow.start(parallelism=2, checkpoint_interval=0.3)
    try:
        soon(lambda: (made.lookup("count", "counts", 1) or after[1]).n > after[1].n, 120.0)
        assert made.lookup("count", "counts", 0).n < after[0].n
    finally:
        query.stop()
