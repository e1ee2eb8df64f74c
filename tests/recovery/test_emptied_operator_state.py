"""An empty broadcast map has nothing in the log but its schema: real tasks, without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from statebackend.api.processors import BroadcastProcessor
from statebackend.errors import StateMismatchError
from statebackend.runtime.worker import operator_state_io as operatorstate
from tests.support.inprocess import InProcessJob

LOOK = [(1, 0)]


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has seen nothing."""
    monkeypatch.setattr(operatorstate, "_of_process", operatorstate.KeptBlobs())


class Priced(BroadcastProcessor):
    """Puts out the prices of all words; a price below zero removes its word."""

    def __init__(self, schema: str, *more: Any) -> None:
        self.schema, self.more = schema, more

    def open(self, ctx: Any) -> None:
        self.rules = ctx.broadcast_state("rules", "word string", self.schema)

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> Any:
        yield key[0], repr([(word, tuple(row)) for (word,), row in self.rules.items()])

    def process_broadcast(self, rows: Iterator[Any], ctx: Any) -> None:
        for row in rows:
            if row.cents < 0:
                self.rules.remove((row.word,))
            else:
                self.rules.put((row.word,), (row.cents, *self.more))


class AsAList(Priced):
    def open(self, ctx: Any) -> None:
        self.rules = ctx.operator_list("rules", self.schema)


def seen(job: InProcessJob) -> str:
    ((_, text),) = job.run(LOOK)
    return text


def kinds(job: InProcessJob) -> set[str]:
    return {one.kind for one in job.log.manifests()[-1].slices}


def test_its_schema_goes_on_through_versions_of_which_no_row_is_left(tmp_path: Path) -> None:
    job = InProcessJob(tmp_path)
    job.start(Priced("cents bigint"))
    job.run(LOOK, [("a", 1)])
    assert "broadcast" in kinds(job)
    job.run(LOOK, [("a", -1)])
    assert "broadcast" not in kinds(job)

    job.start(Priced("cents bigint, of string", "x"))
    assert seen(job) == "[]"
    job.run(LOOK, [("b", 2)])
    job.start(Priced("cents bigint, of string", "y"), parallelism=1)
    job.run(LOOK, [("c", 3)])
    assert seen(job) == "[('b', (2, 'x')), ('c', (3, 'y'))]"
    versions = [len(spec.versions.get("rules", [])) for spec in job.specs.values()]
    assert versions == [2], "the one without rows counts"


def test_it_does_not_become_a_state_of_another_kind(tmp_path: Path) -> None:
    job = InProcessJob(tmp_path)
    job.start(Priced("cents bigint"))
    job.run(LOOK, [("a", 1)])
    job.run(LOOK, [("a", -1)])
    with pytest.raises(StateMismatchError, match="rules"):
        job.start(AsAList("cents bigint"))
