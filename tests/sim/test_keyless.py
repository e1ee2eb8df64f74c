"""Operator state in the simulation: its model against the real lists, and what its checker sees."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from snapshot.formats.record import Record, SliceEntry
from statebackend.operators.operator_snapshot import StoredOperatorState
from statebackend.state.operator_state import encode_lists, redistribute
from tests.sim.checkers.keyless import Keyless
from tests.sim.kernel import Scheduler
from tests.sim.keyless import KeylessState, Part, Played, Rows, decoded_part, whole_after
from tests.sim.location import Committed, Plan
from tests.sim.world import Stopped

NOTHING = StoredOperatorState()
QUEUED = Part({"queue": (b"one", b"two")})


def _stored(part: Part) -> StoredOperatorState:
    """A part as it is stored."""
    played = Played(NOTHING)
    queue: Any = played._held.states["queue"]
    seen: Any = played._held.states["seen"]
    rules: Any = played._held.states["rules"]
    queue.update((row,) for row in part.rows("queue"))
    seen.update((row,) for row in part.rows("seen"))
    played._held.gate.is_open = True
    for key, row in part.rules.items():
        rules.put((key,), (row,))
    return played.snapshot().stored


@pytest.mark.parametrize("seed", range(20))
def test_the_processor_does_what_the_model_says_at_every_parallelism(seed: int) -> None:
    random = Random(seed)
    state, stored = KeylessState(), [NOTHING]
    for batch in range(12):
        plan = Plan(batch, 0, random.getrandbits(40), 0)
        parallelism = random.choice([len(stored), random.randint(1, 5)])
        by_subtask: list[Rows] = [
            [(b"00000key", random.randrange(9)) for _ in range(random.randrange(5))]
            for _ in range(parallelism)
        ]
        begun = [part.lists for part in stored]
        if parallelism != len(stored):
            begun = [redistribute(begun, parallelism, n) for n in range(parallelism)]
        following = []
        for subtask, lists in enumerate(begun):
            played = Played(StoredOperatorState(lists, stored[0].maps))
            assert played.begun == state.begun(subtask, parallelism)
            played.process(plan, batch, subtask, by_subtask[subtask])
            following.append(played.snapshot().stored)
        state, stored = whole_after(state, plan, batch, by_subtask), following
        assert tuple(map(decoded_part, stored)) == state.parts


# --- the checker ---------------------------------------------------------------------------------


class World:
    """As much of a world as the checker asks for."""

    def __init__(self) -> None:
        self.sched = Scheduler(0)
        self.config = SimpleNamespace(keyless=True, asynchronous=False)
        self.bucket: Any = SimpleNamespace(objects={})
        self.shared = SimpleNamespace(commits={})

    def violated(self, checker: str, what: str) -> None:
        raise Stopped(what)


def _record(sequence: int, epoch: int, part: Part, name: str | None = None) -> Record:
    data = encode_lists(_stored(part).lists)
    entry = SliceEntry(
        operator="op",
        subtask=0,
        kind="operator",
        epoch=epoch,
        key_group_start=0,
        key_group_end=127,
        attempt=0,
        rows=len(part.rows("queue")),
        size_bytes=len(data),
        digest=f"{epoch:064}",
        chain="",
        offset=None if name else 0,
        object=name,
    )
    manifest: Any = SimpleNamespace(
        kind="checkpoint", operator="op", epoch=epoch, parallelism=1, slices=[entry]
    )
    found: Any = SimpleNamespace(manifest=manifest, name=f"{sequence}", slice=lambda _: data)
    return found  # type: ignore[no-any-return]


def _committed(batch: int, part: Part) -> Committed:
    return Committed(Plan(batch, 0, 0, 0), 0, {}, {}, KeylessState((part,)))


def test_a_record_that_holds_what_the_batch_made_is_right() -> None:
    checker = Keyless(World())
    checker.record(0, _record(0, 0, QUEUED))
    checker.committed(_committed(0, QUEUED))


def test_a_record_with_other_rows_is_seen() -> None:
    checker = Keyless(World())
    checker.record(0, _record(0, 0, Part({"queue": (b"one",)})))
    with pytest.raises(Stopped, match="the log holds"):
        checker.committed(_committed(0, QUEUED))


def test_a_record_that_names_what_is_not_there_is_seen() -> None:
    with pytest.raises(Stopped, match="not there"):
        Keyless(World()).record(0, _record(0, 0, QUEUED, name="data/gone"))


@pytest.mark.parametrize("parallelism", [1, 2])
def test_an_attempt_that_begins_with_another_part_is_seen(parallelism: int) -> None:
    attempt: Any = SimpleNamespace(
        keyless=KeylessState((QUEUED,)), subtask=0, parallelism=parallelism
    )
    right = QUEUED if parallelism == 1 else Part({"queue": (b"one",)})
    checker = Keyless(World())
    checker.restored(attempt, right)
    with pytest.raises(Stopped, match="begins with"):
        checker.restored(attempt, Part())
