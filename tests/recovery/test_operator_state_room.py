"""What lists, deltas and bases do with the room that an ack has: real tasks, without Spark."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from recovery.inspect.verify import verify
from snapshot.formats.record import SliceEntry
from snapshot.storage.stores_by_uri import open_store
from statebackend import system
from statebackend.api.processors import KeyedProcessor
from statebackend.runtime.worker import operator_state_io as operatorstate
from tests.support.inprocess import InProcessJob

BUDGET = 4096
EPOCHS = 8
EVERY = 2
KEYS = range(20)


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has seen nothing."""
    monkeypatch.setattr(operatorstate, "_of_process", operatorstate.KeptBlobs())


class Hoard(KeyedProcessor):
    """Keeps a sum for each key, and a list of about so many bytes; a value of -1 only looks."""

    def __init__(self, list_bytes: int) -> None:
        self.list_bytes = list_bytes

    def open(self, ctx: Any) -> None:
        self.total = ctx.value_state("total", "v bigint")
        self.hoard = ctx.operator_list("hoard", "v bigint, text string")

    def process(self, key: Any, rows: Any, ctx: Any) -> Any:
        for row in rows:
            if row.v < 0:
                texts = [(v, len(text)) for v, text in self.hoard.get()]
                yield key[0], repr((self.total.get(), texts))
                continue
            self.total.update(((self.total.get() or (0,))[0] + row.v,))
            self.hoard.update([(row.v, "x" * self.list_bytes)])


def written(job: InProcessJob, *epochs: list[tuple[int, int]]) -> list[SliceEntry]:
    """Run some epochs: what their records name."""
    found: list[SliceEntry] = []
    for rows in epochs:
        job.run(rows)
        found += job.log.manifests()[-1].slices
    return found


def of_kind(slices: list[SliceEntry], kind: str) -> list[SliceEntry]:
    return [one for one in slices if one.kind == kind]


@pytest.mark.parametrize(
    ("list_bytes", "list_apart", "base_apart"),
    [
        pytest.param(100, False, False, id="room for all"),
        pytest.param(BUDGET - 1500, False, True, id="room for the list, then none for a base"),
        pytest.param(BUDGET - 800, True, False, id="none for the list beside the delta"),
        pytest.param(10 * BUDGET, True, False, id="a list over the whole budget"),
    ],
)
def test_a_small_base_is_written_whenever_it_is_due_whatever_the_lists_take(
    tmp_path: Path, list_bytes: int, list_apart: bool, base_apart: bool
) -> None:
    job = InProcessJob(tmp_path, inline_limit_bytes=BUDGET, base_every_epochs=EVERY)
    job.start(Hoard(list_bytes))
    slices = written(job, *([(key, epoch) for key in KEYS] for epoch in range(EPOCHS)))
    deltas, lists, bases = (of_kind(slices, kind) for kind in ("delta", "operator", "base"))
    assert not [one for one in deltas if one.object]
    assert [one.epoch for one in lists] == list(range(EPOCHS))
    assert {one.object is not None for one in lists} == {list_apart}
    assert [one.epoch for one in bases] == list(range(EVERY, EPOCHS, EVERY))  # never left out
    assert {one.object is not None for one in bases} == {base_apart}
    assert all(0 < one.size_bytes <= BUDGET for one in bases)
    shutil.rmtree(tmp_path / "local")
    operatorstate._of_process = operatorstate.KeptBlobs()
    assert verify(open_store(str(tmp_path / "store"), new_id=system.new_id), "job").ok
    job.start(Hoard(list_bytes))
    expected = repr(((sum(range(EPOCHS)),), [(EPOCHS - 1, list_bytes)]))
    assert sorted(job.run([(key, -1) for key in KEYS])) == [(key, expected) for key in KEYS]


def test_a_list_that_does_not_change_keeps_its_object(tmp_path: Path) -> None:
    job = InProcessJob(tmp_path, inline_limit_bytes=BUDGET)
    job.start(Hoard(10 * BUDGET))
    slices = written(job, [(1, 7)], *([[(2, -1)]] * 4))
    names = [one.object for one in of_kind(slices, "operator")]
    assert len(names) == 5
    assert len(set(names)) == 1


def test_state_that_is_over_the_budget_by_itself_is_no_small_base(tmp_path: Path) -> None:
    """It is uploaded apart, in the background, and not in the batch's time."""
    job = InProcessJob(tmp_path, inline_limit_bytes=1024, base_every_epochs=EVERY)
    job.start(Hoard(100))
    rows = [[(key, epoch) for key in range(1000)] for epoch in range(EPOCHS)]
    assert not of_kind(written(job, *rows), "base")
