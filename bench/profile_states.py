"""What each kind of state, and timers, cost a key: for `python -m bench profile`.

Whole epochs of one subtask over a RocksDB that holds the keys' state, one row a key, without Spark;
each figure is what a processor's step adds to one that only reads its rows.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row

from bench.inproc import INPUT, OUTPUT, STATE, UID
from statebackend.operators.declared_states import EpochTimes, StateDeclaration
from statebackend.operators.epoch_phases import StatefulEpoch
from statebackend.operators.input.group_by_key import Groups
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.rocks.store import Marker, RocksStore
from statebackend.schema.codec import codec_for
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.state.table import StateTable

__all__ = ["MAP_ENTRIES", "state_costs"]

MAP_ENTRIES = 100
LIST_ROWS = 10
_IDS = {"count": 1, "map": 2, "list": 3}
_NOW_MS = 1_000
_LATER_MS = 1 << 40
_SCHEMA = STATE.json()
_STATES = {
    "count": StateDeclaration(name="count", kind="value", value_schema=_SCHEMA),
    "map": StateDeclaration(name="map", kind="map", value_schema=_SCHEMA, key_schema=_SCHEMA),
    "list": StateDeclaration(name="list", kind="list", value_schema=_SCHEMA),
}


class _Step(StatefulProcessor):
    """Reads its rows, then does one thing."""

    asks = ""

    def init(self, handle: Any) -> None:
        self._handle = handle
        if self.asks == "map":
            self._state = handle.getMapState("map", STATE, STATE)
        elif self.asks == "list":
            self._state = handle.getListState("list", STATE)
        elif self.asks:
            self._state = handle.getValueState("count", STATE)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> list[Any]:
        for _ in rows:
            pass
        self.step(key)
        return []

    def step(self, key: Any) -> None:
        pass

    def close(self) -> None:
        pass


class _ValueGet(_Step):
    asks = "count"

    def step(self, key: Any) -> None:
        self._state.get()


class _ValueUpdate(_Step):
    asks = "count"

    def step(self, key: Any) -> None:
        self._state.update((1,))


class _MapGet(_Step):
    asks = "map"

    def step(self, key: Any) -> None:
        self._state.getValue((key[0] % MAP_ENTRIES,))


class _MapGetUpdate(_Step):
    asks = "map"

    def step(self, key: Any) -> None:
        entry = (key[0] % MAP_ENTRIES,)
        old = self._state.getValue(entry)
        self._state.updateValue(entry, (old[0] + 1,))


class _MapContainsGet(_Step):
    asks = "map"

    def step(self, key: Any) -> None:
        if self._state.containsKey((key[0] % MAP_ENTRIES,)):
            self._state.getValue((key[0] % MAP_ENTRIES,))


class _ListAppend(_Step):
    asks = "list"

    def step(self, key: Any) -> None:
        self._state.appendValue((1,))


class _ListGet(_Step):
    asks = "list"

    def step(self, key: Any) -> None:
        for _ in self._state.get():
            pass


class _TimerSet(_Step):
    at_ms = _LATER_MS

    def step(self, key: Any) -> None:
        self._handle.registerTimer(self.at_ms)


class _TimerFires(_TimerSet):
    """Sets a timer that is due at once."""

    at_ms = _NOW_MS

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> list[Any]:
        return []


_CASES: list[tuple[str, type[_Step], type[_Step] | None, str]] = [
    ("(reads its rows only: a whole epoch)", _Step, None, "none"),
    ("ValueState loaded, get", _ValueGet, _Step, "none"),
    ("ValueState loaded, update", _ValueUpdate, _Step, "none"),
    (f"MapState.getValue, one of {MAP_ENTRIES}", _MapGet, _Step, "none"),
    ("MapState.getValue, updateValue", _MapGetUpdate, _Step, "none"),
    ("MapState.containsKey, getValue", _MapContainsGet, _Step, "none"),
    ("ListState.appendValue", _ListAppend, _Step, "none"),
    (f"ListState.get, {LIST_ROWS} rows", _ListGet, _Step, "none"),
    ("registerTimer", _TimerSet, _Step, "processing"),
    ("a timer fires, one a key", _TimerFires, _TimerSet, "processing"),
]


def state_costs(folder: Path, groups: Groups, *, repeats: int) -> list[dict[str, Any]]:
    """The cost of each step, over ``groups`` of one row a key; the fastest of the repeats."""
    store = _prepare(folder, groups)
    best: dict[type[_Step], int] = {}
    for _ in range(repeats):
        for _, kind, _, mode in _CASES:
            gc.collect()
            gc.disable()
            start = time.thread_time_ns()
            _epoch(groups, store, kind(), mode)
            best[kind] = min(best.get(kind, 1 << 62), time.thread_time_ns() - start)
            gc.enable()
    store.close()
    return [
        {
            "step": name,
            "cpu_ns_per_row": round((best[kind] - (best[less] if less else 0)) / len(groups), 1),
        }
        for name, kind, less, _ in _CASES
    ]


def _epoch(groups: Groups, store: RocksStore, processor: _Step, time_mode: str) -> None:
    states = {processor.asks: _STATES[processor.asks]} if processor.asks else {}
    plan = OperatorPlan(
        uid=UID,
        flavour="rows",
        input_schema=INPUT,
        key_positions=(0,),
        output_schema=OUTPUT,
        states=states,
        time_mode=time_mode,
    )
    epoch = StatefulEpoch(
        plan,
        processor,
        table=StateTable(store),
        state_ids=_IDS,
        times=EpochTimes(processing_time_ms=_NOW_MS),
        key_groups=range(128),
    )
    for _ in epoch.run(iter([groups])):
        pass


def _prepare(folder: Path, groups: Groups) -> RocksStore:
    value, map_key = codec_for(STATE).encode((7,)), KeyCodec(STATE)
    entries = [map_key.encode((n,)) for n in range(MAP_ENTRIES)]
    places = [n.to_bytes(8, "big") for n in range(LIST_ROWS)]
    marker = Marker(
        job_id="", operator=UID, key_group_start=0, key_group_end=127, epoch=0, chain=""
    )
    found: dict[bytes, bytes] = {}
    for group, key in zip(groups.key_groups, groups.keys, strict=True):
        prefixes = {name: group + _IDS[name].to_bytes(2, "big") + key for name in _IDS}
        found[prefixes["count"]] = value
        found[prefixes["list"]] = LIST_ROWS.to_bytes(8, "big")
        found.update((prefixes["list"] + place, value) for place in places)
        found.update((prefixes["map"] + entry, value) for entry in entries)
    keys = sorted(found)
    store = RocksStore.open(str(folder / "states"))
    store.apply(keys, [found[key] for key in keys], marker)
    store.close()
    return RocksStore.open(str(folder / "states"))
