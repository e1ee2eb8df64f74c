"""Spark's checkpoint location, and the input that its offsets stand for.

``offsets/n`` says how batch n was cut; it stays the same when the batch is repeated. ``commits/n``
is the moment from which the batch counts. What the sink took of the batch becomes visible with it:
an output that is idempotent by batch id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any

from recovery.decide.taken_back_files import TakenBack
from statebackend.keygroups import subtask_of
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from tests.sim.clocks import BEGAN_MS
from tests.sim.config import Config
from tests.sim.freezes import at_call
from tests.sim.kernel import Scheduler
from tests.support.faults import Fault

__all__ = [
    "GROUPS",
    "Committed",
    "Plan",
    "Shared",
    "SimLocation",
    "State",
    "after",
    "clipped",
    "difference",
    "key_of",
    "rows_of",
]

State = dict[bytes, bytes]
GROUPS = 128
_IO_S = 0.003


@dataclass(frozen=True)
class Plan:
    """One batch as it was cut. ``salt_free``: every evaluation sees the same rows."""

    batch: int
    stamp_ms: int
    seed: int
    rows: int


@dataclass(frozen=True)
class Committed:
    """A batch that Spark has committed.

    Attributes:
        state: what state must be after it; from a plain model of the input.
        output: what the sink took; None where it took a part only.
        session: of the query that committed it.
    """

    plan: Plan
    salt: int
    state: State
    output: State | None
    keyless: Any = None  # see `tests.sim.keyless.KeylessState`
    second: Committed | None = None  # what it made of a second operator
    clock: Any = None  # of the next batch, see `tests.sim.timemodel.Clock`
    session: str = ""


@dataclass
class Shared:
    """The files of the location. ``query_id`` is in its metadata.

    Attributes:
        parallelism, second_parallelism: what the next query is started with.
    """

    parallelism: int = 1
    second_parallelism: int = 2
    query_id: str | None = None
    offsets: dict[int, Plan] = field(default_factory=dict)
    commits: dict[int, Committed] = field(default_factory=dict)
    plans: int = 0
    go_back_to: int | None = None  # what the next start is told
    went_back_to: set[int] = field(default_factory=set)
    in_part: int = -2  # the last batch that was read in part
    begun_by: set[str] = field(default_factory=set)  # runs that took in the initial state
    hidden: dict[str, Plan | Committed] = field(default_factory=dict)
    purged: dict[tuple[str, int], Plan | Committed] = field(default_factory=dict)
    config: Config = field(default_factory=Config)
    at_freeze: Callable[[], None] = int  # does nothing
    at_taken: Callable[[str, int], object] = lambda folder, batch: None

    def change_s(self, sched: Scheduler) -> float:
        """How long a change of a file takes; whoever makes it may be frozen right before."""
        if not sched.chance(self.config.start_frozen):
            return _IO_S
        sched.note(Fault.START_FROZEN)
        self.at_freeze()
        return 0.3 + 5.0 * sched.random.random() ** 2

    def purge(self, planned: int) -> None:
        """What Spark removes once it has planned a batch."""
        known: Any = {"offsets": self.offsets, "commits": self.commits}
        for folder, files in known.items():
            for batch in [n for n in files if n < planned - self.config.batches_kept]:
                self.purged[folder, batch] = files.pop(batch)


class SimLocation(CheckpointLocation):
    """The real way back, over `Shared`. Whoever changes a file may be frozen right before it."""

    def __init__(self, shared: Shared, sched: Scheduler) -> None:
        self.path = "/location"
        self._shared, self._sched = shared, sched

    def _query_id(self) -> str | None:
        return self._shared.query_id

    def _files(self, folder: str) -> dict[int, Any]:
        return self._shared.offsets if folder == "offsets" else self._shared.commits

    def _batches(self, folder: str) -> frozenset[int]:
        at_call()
        self._sched.pause(_IO_S)
        return frozenset(self._files(folder))

    def _names(self, folder: str) -> list[str]:
        at_call()
        self._sched.pause(_IO_S)
        hidden = (name.partition("/") for name in self._shared.hidden)
        return [name for there, _, name in hidden if there == folder]

    def drafts(self) -> list[str]:
        """Files are there whole or not at all here."""
        return []

    def remove_drafts(self, names: Iterable[str]) -> None:
        """See `drafts`."""

    def stamp_ms(self, name: str) -> int | None:
        at_call()
        self._sched.pause(_IO_S)
        folder, _, batch = name.partition("/")
        plan = self._shared.hidden.get(name) or (
            self._files(folder).get(int(batch)) if batch.isdigit() else None
        )
        return plan.stamp_ms if isinstance(plan, Plan) else None

    def _exists(self, name: str) -> bool:
        at_call()
        self._sched.pause(_IO_S)
        folder, _, batch = name.partition("/")
        return name in self._shared.hidden or (
            batch.isdigit() and int(batch) in self._files(folder)
        )

    def _rename(self, source: str, target: str, *, replace: bool) -> bool:
        """What has that name already is replaced."""
        at_call()
        self._sched.pause(self._shared.change_s(self._sched))
        hidden = self._shared.hidden
        folder, _, batch = (target if "/." in source else source).partition("/")
        files = self._files(folder)
        if source in hidden:
            self._sched.note(f"{folder} put back", batch)
            files[int(batch)] = hidden.pop(source)
        elif "/." not in source and int(batch) in files:
            self._sched.note(f"{folder} taken back", batch)
            self._shared.at_taken(folder, int(batch))
            hidden[target] = files.pop(int(batch))
        else:
            return False
        return True

    def drop(self, one: TakenBack) -> None:
        at_call()
        self._sched.pause(self._shared.change_s(self._sched))
        self._shared.hidden.pop(one.name, None)


def key_of(number: int) -> bytes:
    """A key as it stands in the state that has number 0."""
    return (number * 47 % GROUPS).to_bytes(2, "big") + b"\x00\x00k%02d" % number


@lru_cache(maxsize=64)
def rows_of(
    plan: Plan, salt: int, parallelism: int, keys: int
) -> tuple[tuple[tuple[bytes, int], ...], ...]:
    """A batch's rows by subtask: a key and an amount; 0 deletes the key."""
    random = Random(plan.seed * 1_000_003 + salt)
    by_subtask: list[list[tuple[bytes, int]]] = [[] for _ in range(parallelism)]
    for _ in range(plan.rows):
        drawn = random.getrandbits(30)
        number = (drawn >> 8) % (3 * keys)
        key = key_of(number)
        group = int.from_bytes(key[:2], "big")
        by_subtask[subtask_of(group, parallelism, GROUPS)].append((key, (drawn >> 16) % 12))
    return tuple(map(tuple, by_subtask))


def clipped(state: State, key_groups: Iterable[int]) -> State:
    """What of a state is of some key groups."""
    wanted = {group.to_bytes(2, "big") for group in key_groups}
    return {key: value for key, value in state.items() if key[:2] in wanted}


def difference(found: State, expected: State) -> str:
    """Some of what differs, for a message."""
    keys = sorted(found.keys() | expected.keys())
    wrong = [key for key in keys if found.get(key) != expected.get(key)]
    return ", ".join(f"{k!r}: {found.get(k)!r} for {expected.get(k)!r}" for k in wrong[:3])


def after(before: State, rows: Iterable[tuple[bytes, int]]) -> tuple[State, State]:
    """The model: state after some rows, and what is put out for them (the last of each key)."""
    state, output = dict(before), {}
    for key, amount in rows:
        if amount == 0:
            state.pop(key, None)
            output[key] = b""
        else:
            state[key] = output[key] = b"%d" % (int(state.get(key, b"0")) + amount)
    return state, output


def plan_of(shared: Shared, batch: int, config: Config, random: Random, wall_ms: int) -> Plan:
    """A batch as the source has it now. ``wall_ms``: as the driver's clock has it."""
    shared.plans += 1
    rows = random.choice([0, config.rows // 4, config.rows, config.rows])
    if config.clock_jumps_every_s and random.random() < 0.5:
        return Plan(batch, wall_ms, random.getrandbits(40), rows)
    if config.timed:  # it goes on, and now and then back by up to two seconds
        seed = random.getrandbits(40)
        return Plan(batch, BEGAN_MS + 300 * shared.plans + seed % 2_000, seed, rows)
    # The driver's clock goes back time and again: batches have the times of earlier ones.
    return Plan(batch, BEGAN_MS + shared.plans % 5, random.getrandbits(40), rows)
