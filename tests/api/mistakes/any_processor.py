"""A processor of each API that does what a test says, and one subtask of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from statebackend import TTL
from statebackend.api.processors import CoProcessor, KeyedProcessor
from statebackend.key_hashing import key_groups
from statebackend.operators.declared_states import EpochTimes
from statebackend.operators.epoch_phases import StatefulEpoch
from statebackend.operators.input.group_by_key import Groups, group_rows
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.operators.processor_calls import record_keyed_states
from statebackend.operators.stateful_processor_calls import record_states
from statebackend.state.table import MemoryBase, StateTable

FLAVOURS = ["rows", "pandas", "keyed", "sides"]
INPUT = T.StructType().add("user", "string").add("n", "long")
SIDES = T.StructType().add("side", "byte").add("key", "string")
for side in "lr":
    for one in INPUT:
        SIDES = SIDES.add(side + one.name, one.dataType)
OUTPUT = T.StructType().add("user", "string").add("n", "long")
GROUPS = 1  # so keys come in their order
Act = Callable[..., Any]


def nothing(p: Any, *_: Any) -> None:
    return None


class Shared:
    """States of every kind, and what each phase does: ``act`` for a key, the others by name."""

    def __init__(self, act: Act = nothing, **phases: Act) -> None:
        self.act, self.phases = act, phases
        self.kept: list[Any] = []

    def phase(self, name: str, *given: Any) -> Any:
        return self.phases.get(name, nothing)(self, *given)


class Spark(Shared, StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.timers = handle
        self.value = handle.getValueState("count", "n bigint")
        self.list = handle.getListState("seen", "n bigint, tags array<string>")
        self.map = handle.getMapState("times", "word binary", "n bigint")
        self.phase("open", handle)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        found = self.act(self, key, rows)
        return () if found is None else found

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        return self.phase("timer", key, expiredTimerInfo.getExpiryTimeInMs()) or ()

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.phase("initial", key)

    def close(self) -> None:
        self.phase("close")


class Own(Shared):
    def open(self, ctx: Any) -> None:
        self.timers = ctx.timers
        self.value = ctx.value_state("count", "n bigint")
        self.list = ctx.list_state("seen", "n bigint, tags array<string>")
        self.map = ctx.map_state("times", "word binary", "n bigint")
        self.folded = ctx.reducing_state("largest", "n bigint", max)
        self.fleeting = ctx.value_state("fleeting", "n bigint", ttl=TTL(1000))
        self.phase("open", ctx)

    def on_timer(self, key: Any, at_ms: int, ctx: Any) -> Any:
        return self.phase("timer", key, at_ms)

    def on_initial(self, key: Any, rows: Any, ctx: Any) -> None:
        self.phase("initial", key)

    def close(self) -> None:
        self.phase("close")


class Keyed(Own, KeyedProcessor):
    def process(self, key: Any, rows: Any, ctx: Any) -> Any:
        return self.act(self, key, rows)


class Paired(Own, CoProcessor):
    def process_left(self, key: Any, rows: Any, ctx: Any) -> Any:
        return self.act(self, key, rows)

    def process_right(self, key: Any, rows: Any, ctx: Any) -> Any:
        return self.act(self, key, rows)


CLASSES: dict[str, Any] = {"rows": Spark, "pandas": Spark, "keyed": Keyed, "sides": Paired}


class Job:
    """One subtask of any flavour; an epoch that fails leaves what the one before left."""

    def __init__(self, flavour: str, time_mode: str = "processing") -> None:
        self.flavour, self.time_mode = flavour, time_mode
        self.base, self.epoch = MemoryBase(), 0

    def record(self, make: Callable[[], Any]) -> dict[str, Any]:
        record = record_states if self.flavour in ("rows", "pandas") else record_keyed_states
        return record(make(), "job", time_mode=self.time_mode).declared

    def plan(self, output: T.StructType, **more: Any) -> OperatorPlan:
        sides = self.flavour == "sides"
        return OperatorPlan(
            uid="job",
            flavour=self.flavour,
            input_schema=SIDES if sides else INPUT,
            key_positions=(1,) if sides else (0,),
            output_schema=output,
            time_mode=self.time_mode,
            sides=(INPUT, INPUT) if sides else None,
            **more,
        )

    def groups(self, users: Sequence[str]) -> Groups:
        keys = pa.array(list(users), pa.string())
        counts = pa.array(range(len(users)), pa.int64())
        if self.flavour == "sides":
            none = pa.nulls(len(users), pa.string()), pa.nulls(len(users), pa.int64())
            left = pa.array([0] * len(users), pa.int8())
            table = pa.table([left, keys, keys, counts, *none], names=SIDES.names)
        else:
            table = pa.table([keys, counts], names=INPUT.names)
        encoded = T_KEYS.encode_arrow([keys])
        return group_rows(table, encoded, key_groups([keys], GROUPS))

    def run(
        self,
        act: Act = nothing,
        users: str = "ab",
        *,
        worker: dict[str, Act] | None = None,
        output: T.StructType = OUTPUT,
        with_initial: bool = False,
        now_ms: int = 1000,
        **phases: Act,
    ) -> list[tuple[Any, ...]]:
        """One epoch; ``worker``: phases that are other there than on the driver."""
        kind = CLASSES[self.flavour]
        opening = {name: phases[name] for name in ("open",) if name in phases}
        states = self.record(lambda: kind(**opening))
        more: dict[str, Any] = {"states": states}
        if with_initial:
            more |= {"initial_schema": INPUT, "initial_key_positions": (0,)}
        table = StateTable(self.base)
        self.processor = kind(act, **(phases if worker is None else worker))
        epoch = StatefulEpoch(
            self.plan(output, **more),
            self.processor,
            table=table,
            state_ids={name: n for n, name in enumerate(states, start=1)},
            times=EpochTimes(epoch=self.epoch, processing_time_ms=now_ms),
            key_groups=range(GROUPS),
        )
        flavour = self.flavour
        first = []
        if with_initial:
            self.flavour = "rows"  # one input, whatever the processor has
            first = [self.groups(users)]
            self.flavour = flavour
        batches = list(epoch.run(iter([self.groups(users)]), initial=first))
        self.base.apply(*table.freeze(self.epoch).sorted())
        self.epoch += 1
        return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]

    def mistake(self, kind: type[Exception], act: Act = nothing, **how: Any) -> str:
        """What is said of an epoch that fails; what it wrote is gone."""
        self.run(remembering)
        before, counts = dict(self.base.entries), self.counts()
        with pytest.raises(kind) as caught:
            self.run(act, **how)
        assert type(caught.value) is kind
        assert self.base.entries == before
        assert self.counts() == counts
        return str(caught.value)

    def counts(self) -> dict[Any, Any]:
        """What the value state holds for each key."""
        seen: dict[Any, Any] = {}
        self.run(lambda p, key, rows: seen.update({key[0]: p.value.get()}))
        return seen


T_KEYS = Job("rows").plan(OUTPUT).key_codec


def remembering(p: Any, key: Any, rows: Any) -> None:
    p.value.update(((p.value.get() or (0,))[0] + 1,))


def here(mark: str) -> str:
    """The line of the caller's file that ends with a mark, as an error names it."""
    file = sys._getframe(1).f_code.co_filename
    lines = Path(file).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, start=1) if line.endswith(f"# {mark}")]
    return f"{file}:{number} in "


def register(p: Any, at_ms: Any) -> None:
    set_timer = getattr(p.timers, "registerTimer", None) or p.timers.register
    set_timer(at_ms)


def extend(p: Any) -> Any:
    return getattr(p.list, "appendList", None) or p.list.extend
