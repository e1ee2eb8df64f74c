"""Lists whose content comes back after cleaning took the object that held it, in random runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshot.bases import BasePolicy
from statebackend.api.calls import record_keyed_states
from statebackend.api.processors import KeyedProcessor
from tests.continuous.state.streamjob import AtOnce, Sometimes, StreamJob, plan_of
from tests.recovery.driver import manifests_of

CONTENTS = range(3)  # few: each of them comes back again and again
ONE_KEY = 1


class Remembers(KeyedProcessor):
    """The newest row of the subtask."""

    def open(self, ctx: Any) -> None:
        self.newest = ctx.operator_list("newest", "v bigint")

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> Iterator[Any]:
        for row in rows:
            self.newest.update([(row.v,)])
            yield (row.v,)


class Trial:
    """What the lists hold, and what they held in the last complete checkpoint."""

    def __init__(self, root: Path, seed: int) -> None:
        self.random = random.Random(seed)
        declared = record_keyed_states(Remembers(), "op", time_mode="none").declared
        self.job = StreamJob(
            root,
            plan_of(declared, "v bigint"),
            Remembers,
            parallelism=1,
            background=Sometimes(seed) if seed % 2 else AtOnce(),
            inline_budget_bytes=0,  # every list is an object of its own
            clean_every_epochs=1,
            policy=BasePolicy(every_epochs=1, apart_every_epochs=1, apart_min_bytes=0),
        )
        self.durable: list[int] = []
        self.cleaned = 0
        self.job.start()

    def contents(self) -> tuple[list[int], list[int]]:
        held: Any = self.job.keyed[0].operator.state.operator.states["newest"]
        read = self.job.sources[0].lists["splits"]
        return [v for (v,) in held.get()], [v for v, _ in read.get()]

    def change(self) -> None:
        content = self.random.choice(CONTENTS)
        self.job.process([(ONE_KEY, content, 0)])
        self.job.sources[0].lists["splits"].update([(content, 0)])

    def checkpoint(self) -> None:
        """One, or two under way at once; with the first that is given up goes the second."""
        job, under_way = self.job, list[tuple[int, Any, list[int]]]()
        for _ in range(self.random.choice([1, 1, 2])):
            under_way.append((job.attempt + 1, job.freeze(), self.contents()[0]))
            self.change()
        for place, (number, frozen, content) in enumerate(under_way):
            if self.random.random() < 0.3:
                job.persist(frozen, self.random.randrange(3))  # what it made nobody ever names
                for newer, *_ in under_way[place:]:
                    job.abort(newer)
                return
            assert job.persist(frozen)
            job.complete(number)
            self.durable = content
            self.cleaned_up()

    def cleaned_up(self) -> None:
        job = self.job
        job.started.session.cleaner.drain(20.0)
        removed = job.started.session.cleaner.reports[-1].removed
        self.cleaned += removed["data"].objects if "data" in removed else 0
        self.check()

    def check(self) -> None:
        """All that a restore may ask for is there."""
        there = {info.name for info in self.job.store.list("")}
        manifests = manifests_of(self.job.store)
        for manifest in manifests:
            if manifest.sequence >= manifests[-1].oldest_needed:
                assert {s.object for s in manifest.slices if s.object} <= there

    def crash(self) -> None:
        self.job.crash(keep_disk=self.random.random() < 0.5)
        if isinstance(self.job.background, Sometimes):
            self.job.background.waiting.clear()
        self.job.start()
        assert self.contents() == (self.durable, self.durable)


@pytest.mark.parametrize("seed", range(6))
def test_a_checkpoint_names_only_objects_that_are_there(tmp_path: Path, seed: int) -> None:
    trial = Trial(tmp_path, seed)
    for _ in range(60):
        if trial.random.random() < 0.6:
            trial.change()
        trial.crash() if trial.random.random() < 0.1 else trial.checkpoint()
    trial.crash()
    trial.job.crash()
    assert trial.cleaned
