"""Timers that are asked time and again what is due, against a set of (time, key)."""

from __future__ import annotations

import random

import pytest

from statebackend.state.cells import KeyCursor
from statebackend.state.spill import OverlaySpill
from statebackend.state.streaming_timers import StreamingTimers
from statebackend.state.table import FrozenOverlay, MemoryBase, StateTable

GROUPS = range(4)


class Subtask:
    """Timers of some keys; key k lies in key group k % 4."""

    def __init__(self, spill: OverlaySpill | None = None) -> None:
        self.base = MemoryBase()
        self.table = StateTable(self.base, spill=spill, small_writes=True)
        self.cursor = KeyCursor()
        self.timers = StreamingTimers(self.cursor, self.table)
        self.timers.look(GROUPS)
        self.model: set[tuple[int, int]] = set()
        self.layers: list[FrozenOverlay] = []
        self.now_ms = 0

    def current(self, key: int) -> None:
        self.cursor.load([(key % 4).to_bytes(2, "big")], [bytes([key])])
        self.cursor.index = 0

    def register(self, key: int, at_ms: int) -> None:
        self.current(key)
        self.timers.register(at_ms)
        self.model.add((at_ms, key))

    def delete(self, key: int, at_ms: int) -> None:
        self.current(key)
        self.timers.delete(at_ms)
        self.model.discard((at_ms, key))

    def check_list(self, key: int) -> None:
        self.current(key)
        assert self.timers.list() == sorted(at for at, owner in self.model if owner == key)

    def fire(self, rng: random.Random) -> None:
        due = sorted((at, k % 4, k) for at, k in self.model if at <= self.now_ms)
        assert self.timers.may_be_due(self.now_ms) or not due
        found = []
        gone: set[tuple[int, int]] = set()
        for at_ms, _, encoded in self.timers.due(GROUPS, self.now_ms):
            key = encoded[0]
            if rng.random() < 0.2:
                self.check_list(key)
            self.current(key)
            if not self.timers.is_current_set(at_ms):
                gone.add((at_ms, key))
                continue
            found.append((at_ms, key % 4, key))
            step = rng.random()
            if step < 0.2:
                self.register(rng.randrange(20), self.now_ms + rng.randrange(-5, 60))
            elif step < 0.3 and self.model:
                other_at, other = rng.choice(sorted(self.model))
                if (other_at, other) != (at_ms, key):
                    self.delete(other, other_at)
                    if (other_at, other % 4, other) in due[len(found) + len(gone) :]:
                        due.remove((other_at, other % 4, other))
                        due.insert(len(found) + len(gone), (other_at, other % 4, other))
            self.current(key)
            self.timers.fired(at_ms)
            self.model.discard((at_ms, key))
        wanted = [one for one in due if (one[0], one[2]) not in gone]
        assert sorted(found) == sorted(set(wanted))
        self.cursor.index = -1

    def freeze(self) -> None:
        self.layers.append(self.table.freeze(0))

    def apply(self) -> None:
        if self.layers:
            layer = self.layers.pop(0)
            self.base.apply(*layer.sorted())
            self.table.applied(layer)


@pytest.mark.parametrize("backwards", [False, True], ids=["onwards", "a clock that steps back"])
@pytest.mark.parametrize("seed", range(40))
def test_timers_fire_once_each_in_whatever_layer_they_lie(
    seed: int, backwards: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = random.Random(seed)
    spill = None
    if seed % 2:
        folder = tmp_path_factory.mktemp("spill")
        spill = OverlaySpill(limit_bytes=1500, folder=lambda: folder / str(rng.random()))
    subtask = Subtask(spill)
    for _ in range(150):
        step = rng.random()
        if step < 0.45:
            subtask.register(rng.randrange(20), subtask.now_ms + rng.randrange(-5, 80))
        elif step < 0.55 and subtask.model:
            at_ms, key = rng.choice(sorted(subtask.model))
            subtask.delete(key, at_ms)
        elif step < 0.65:
            subtask.freeze()
        elif step < 0.75:
            subtask.apply()
        elif step < 0.8:
            subtask.check_list(rng.randrange(20))
        elif step < 0.85:
            subtask.table.seal()
        else:
            subtask.now_ms += rng.randrange(30)
            if backwards and rng.random() < 0.2:
                subtask.now_ms -= rng.randrange(200)
            subtask.fire(rng)
        bound = subtask.timers.not_before_ms()
        first = min((at for at, _ in subtask.model), default=None)
        assert first is None or (bound is not None and bound <= first)
    subtask.now_ms += 1000
    subtask.fire(random.Random(1))
    subtask.fire(random.Random(1))


def test_nothing_is_read_while_nothing_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    subtask = Subtask()
    subtask.register(1, 100)
    subtask.register(2, 200)
    subtask.now_ms = 100
    subtask.fire(random.Random(0))
    subtask.model = {(200, 2)}
    monkeypatch.setattr(subtask.base, "scan_keys", None)
    monkeypatch.setattr(subtask.base, "get", None)
    assert not subtask.timers.may_be_due(199)
    subtask.freeze()
    assert not subtask.timers.may_be_due(199)
    assert subtask.timers.may_be_due(200)
    assert subtask.timers.not_before_ms() == 200
