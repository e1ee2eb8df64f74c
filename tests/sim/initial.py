"""An initial state, in the simulation: what a start gives, and how it is written and read.

The frame and its files are played. Which starts write it, under which names, to whom it is handed,
which starts are refused without it and when its objects may go, is all the real code's.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
from blake3 import blake3

from snapshot.formats.object_names import data_name
from snapshot.protocol.messages import SlicePart
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import CorruptionError
from statebackend.keygroups import key_group_range
from statebackend.spark.frames.initial_state_writer import InitialState
from tests.sim.location import GROUPS, State, clipped, key_of

if TYPE_CHECKING:
    from tests.sim.app import App

__all__ = ["given", "initial_of", "read", "write"]


def initial_of(keys: int) -> State:
    """What the keys of a job begin with, by the model: every second one has something."""
    return {key_of(number): b"%d" % (500 + number) for number in range(0, 3 * keys, 2)}


def given(app: App) -> InitialState | None:
    """What a start of the query gives: none, where its user forgets it once it was taken in."""
    world = app.world
    if not world.config.initial:
        return None
    if world.newest is not None and not world.is_calm and world.sched.chance(0.2):
        world.sched.note("started without its initial state", app.process.name)
        return None
    on: Any = SimpleNamespace(conf=SimpleNamespace(get=lambda name: "true"))
    frame: Any = SimpleNamespace(
        sparkSession=on,
        store=app.job.store,
        new_id=world.sched.new_id,
        rows=initial_of(world.config.keys),
    )
    world.sched.note("started with its initial state")
    return InitialState(frame, ())


def write(
    state: InitialState, *, parallelism: int, generation: int, epoch: int, **more: Any
) -> dict[int, SlicePart]:
    """In the place of the real one, which has Spark write the rows of a frame."""
    frame: Any = state.frame
    parts = {}
    for subtask in range(parallelism):
        groups = key_group_range(subtask, parallelism, GROUPS)
        rows = clipped(frame.rows, range(groups.start, groups.end + 1))
        if not rows:
            continue
        data = msgspec.msgpack.encode(sorted(rows.items()))
        name = data_name(generation, epoch, frame.new_id())
        frame.store.put(name, [data])
        digest = blake3(data).hexdigest()
        parts[subtask] = SlicePart(digest=digest, size_bytes=len(data), rows=len(rows), name=name)
    return parts


def read(store: ObjectStore, parts: Sequence[SlicePart]) -> State:
    """A subtask's part.

    Raises:
        CorruptionError: an object is damaged.
    """
    state: State = {}
    for part in parts:
        assert part.name is not None
        data = store.get(part.name)
        if blake3(data).hexdigest() != part.digest:
            raise CorruptionError(f"The initial state in {part.name!r} is damaged.")
        state |= dict(msgspec.msgpack.decode(data, type=list[tuple[bytes, bytes]]))
    return state
