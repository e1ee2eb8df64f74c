"""A job whose lists take few contents, so that each comes back after cleaning took its object."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

import snapshot.protocol.coordinator
from snapshot.protocol.base_policy import BasePolicy
from statebackend.api.processors import KeyedProcessor
from statebackend.errors import StateBackendError
from statebackend.operators.processor_calls import record_keyed_states
from statebackend.runtime.worker.operator_state_io import OperatorStateIO
from tests.continuous.state.streamjob import AtOnce, Sometimes, StreamJob, plan_of
from tests.planted.bug import Patches, PlantedBug, Simulation, by_name, planted
from tests.recovery.driver import manifests_of
from tests.support.faults import Fault
from tests.support.process_stores import close_stores

__all__ = ["SIMULATION", "STEPS", "STRIKES", "Trial", "Wrong"]

STEPS = 60
STRIKES = (Fault.DRIVER_KILLED, Fault.LOCAL_FILE_GONE)
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


class Wrong(Exception):
    """A checker has seen what must never be."""

    def __init__(self, checker: str, what: str) -> None:
        super().__init__(what)
        self.checker, self.what = checker, what


@dataclass
class Result:
    """What became of one trial."""

    counts: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[str, str]] = field(default_factory=list)


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
        self.counts: Counter[str] = Counter()
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
                gone = {s.object for s in manifest.slices if s.object} - there
                if gone:
                    raise Wrong("references", f"{manifest.sequence} names {sorted(gone)}: gone")

    def crash(self) -> None:
        keep_disk = self.random.random() < 0.5
        self.counts[Fault.DRIVER_KILLED] += 1
        self.counts[Fault.LOCAL_FILE_GONE] += not keep_disk
        self.job.crash(keep_disk=keep_disk)
        if isinstance(self.job.background, Sometimes):
            self.job.background.waiting.clear()
        self.job.start()
        found = self.contents()
        if found != (self.durable, self.durable):
            raise Wrong("state", f"{found} was restored for {self.durable}")

    def live(self, steps: int) -> None:
        """Some changes, checkpoints and crashes; at the end all is there once more."""
        for _ in range(steps):
            if self.random.random() < 0.6:
                self.change()
            self.crash() if self.random.random() < 0.1 else self.checkpoint()
        self.crash()


# --- what is planted in it --------------------------------------------------------------------


def names_outlive_objects() -> Patches:
    """As it was: whatever was named once in a run is named again."""
    really = OperatorStateIO.write

    def write(self: Any, taken: Any, reply: Any, names: Any, budget_bytes: int) -> Any:
        earlier = self.__dict__.setdefault("earlier", {})
        earlier.update((part.digest, part) for part in reply.operator_parts if part.name)
        more = msgspec.structs.replace(reply, operator_parts=list(earlier.values()))
        return really(self, taken, more, names, budget_bytes)

    yield OperatorStateIO, "write", write
    yield snapshot.protocol.coordinator, "check_ack_objects", lambda ack, generation, given: None


BUGS: Final = by_name(
    PlantedBug(
        "a name outlives its object",
        "a subtask keeps the names of objects for the life of a run, and nobody refuses an old one",
        ("references",),
        names_outlive_objects,
        issue18="1",
    )
)


def _simulate(seed: int, bug: PlantedBug | None) -> Result:
    result = Result()
    with tempfile.TemporaryDirectory(prefix="content-") as folder, planted(bug):
        trial = Trial(Path(folder), seed)
        try:
            trial.live(STEPS)
        except Wrong as wrong:
            result.violations.append((wrong.checker, wrong.what))
        except StateBackendError as error:
            result.violations.append(("error", str(error)))
        finally:
            with contextlib.suppress(StateBackendError):
                trial.job.crash()
            close_stores()
        result.counts = trial.counts
    return result


SIMULATION: Final = Simulation("content", BUGS, _simulate, seeds=16, clean_seeds_max=8)
