"""Spark's checkpoint location, and the input that its offsets stand for.

``offsets/n`` says how batch n was cut; it stays the same when the batch is repeated. ``commits/n``
is the moment from which the batch counts. What the sink took of the batch becomes visible with it:
an output that is idempotent by batch id.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random

from statebackend.keygroups import subtask_of
from statebackend.spark.location import CheckpointLocation
from tests.sim.config import Config
from tests.sim.kernel import Scheduler

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
    """

    plan: Plan
    salt: int
    state: State
    output: State | None


@dataclass
class Shared:
    """The files of the location. ``query_id`` is in its metadata.

    Attributes:
        parallelism: what the next query is started with.
    """

    parallelism: int = 1
    query_id: str | None = None
    offsets: dict[int, Plan] = field(default_factory=dict)
    commits: dict[int, Committed] = field(default_factory=dict)
    plans: int = 0
    in_part: int = -2  # the last batch that was read in part

    def trim(self) -> None:
        """Spark keeps the last hundred batches; fewer do."""
        for files in (self.offsets, self.commits):
            for batch in sorted(files)[:-10]:
                del files[batch]


class SimLocation(CheckpointLocation):
    """The real rewind and trim, over `Shared`."""

    def __init__(self, shared: Shared, sched: Scheduler) -> None:
        self.path = "/location"
        self._shared, self._sched = shared, sched

    def _query_id(self) -> str | None:
        return self._shared.query_id

    def _last(self, folder: str) -> int:
        self._sched.pause(_IO_S)
        return max(
            self._shared.offsets if folder == "offsets" else self._shared.commits, default=-1
        )

    def _remove(self, name: str) -> None:
        self._sched.pause(_IO_S)
        folder, _, batch = name.partition("/")
        self._sched.note(f"{folder} taken back", batch)
        files = self._shared.offsets if folder == "offsets" else self._shared.commits
        files.pop(int(batch), None)  # type: ignore[attr-defined]


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
        group = number * 47 % GROUPS
        key = group.to_bytes(2, "big") + b"\x00\x00k%02d" % number
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


def plan_of(shared: Shared, batch: int, config: Config, random: Random) -> Plan:
    """A batch as the source has it now."""
    shared.plans += 1
    rows = random.choice([0, config.rows // 4, config.rows, config.rows])
    # The driver's clock goes back time and again: batches have the times of earlier ones.
    return Plan(batch, 1_700_000_000_000 + shared.plans % 5, random.getrandbits(40), rows)
