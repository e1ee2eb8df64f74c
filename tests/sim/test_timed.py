"""What goes by time in the simulation: its model against the real timers, and its checker."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from statebackend.state.table import MemoryBase, StateTable
from tests.sim.checkers.times import Times
from tests.sim.clocks import BEGAN_MS
from tests.sim.initial import initial_of
from tests.sim.location import Plan, State, rows_of
from tests.sim.timed import Timed, event_max_ms
from tests.sim.timemodel import DELAY_MS, EVENT, PROCESSING, Clock, after, next_timer_ms
from tests.sim.world import Stopped

GROUPS = range(128)


def _plan(batch: int, stamp_ms: int, random: Random) -> Plan:
    return Plan(batch, BEGAN_MS + stamp_ms, random.getrandbits(40), random.choice([0, 5, 40]))


def _played(mode: str, plan: Plan, table: StateTable, clock: Clock, initial: State) -> State:
    """A batch as the processor has it; what it puts out."""
    reply: Any = SimpleNamespace(
        key_group_start=0,
        key_group_end=127,
        watermark_ms=clock.watermark_ms,
        late_watermark_ms=clock.late_ms,
    )
    output: State = {}
    rows = rows_of(plan, 0, 1, 3)[0]
    for key, total in initial.items():
        table.put(key, total)
    timed = Timed(mode, plan, table, reply, rows, output)
    timed.begin_with(initial)
    for key, amount in rows:
        if timed.is_late(key, amount):
            continue
        timed.take(key, amount)
        found = b"%d" % (int(table.get(key) or b"0") + amount) if amount else None
        table.put(key, found)
        output[key] = found or b""
    timed.end()
    assert timed.figures.next_timer_ms == next_timer_ms(dict(table.snapshot()))
    return output


@pytest.mark.parametrize("mode", [EVENT, PROCESSING])
@pytest.mark.parametrize("layers", [0, 1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_the_processor_does_what_the_model_says(mode: str, layers: int, seed: int) -> None:
    random, base, state, clock = Random(seed), MemoryBase(), State(), Clock()
    table = StateTable(base)
    fired = 0
    for batch in range(25):
        plan = _plan(batch, 400 * batch + random.choice([0, 0, -1_500, 9_000]), random)
        initial = initial_of(3) if not batch else State()
        output = _played(mode, plan, table, clock, initial)
        state, expected = after(mode, state, plan, rows_of(plan, 0, 1, 3)[0], clock, initial)
        assert output == expected
        assert dict(table.snapshot()) == state
        fired += sum(b"@" in key for key in output)
        clock = clock.after(mode, plan, rows_of(plan, 0, 1, 3)[0])
        table.freeze(batch)
        for frozen in table.frozen[: max(0, len(table.frozen) - layers)]:
            base.apply(*frozen.sorted())
            table.applied(frozen)
    assert fired > 10


def test_the_watermark_follows_what_was_seen_and_never_goes_back() -> None:
    plan = Plan(50, BEGAN_MS, 1, 4)
    rows = rows_of(plan, 0, 1, 3)[0]
    seen_ms = event_max_ms(EVENT, plan, rows)
    assert seen_ms is not None
    first = Clock().after(EVENT, plan, rows)
    assert first == Clock(seen_ms - DELAY_MS, 0, seen_ms)
    again = first.after(EVENT, Plan(0, BEGAN_MS, 1, 4), rows)
    assert again == Clock(first.watermark_ms, first.watermark_ms, seen_ms)
    assert again.after(PROCESSING, plan, rows) == again


# --- the checker ---------------------------------------------------------------------------------


class World:
    """As much of a world as the checker asks for."""

    def __init__(self, durable: State) -> None:
        self.config = SimpleNamespace(timed=EVENT)
        self.once = SimpleNamespace(newest=0, durable={7: durable})

    def violated(self, checker: str, what: str) -> None:
        raise Stopped(what)


def _record(next_ms: int | None) -> Any:
    manifest = SimpleNamespace(kind="checkpoint", operator="op", epoch=7, next_timer_ms=next_ms)
    return SimpleNamespace(manifest=manifest)


def test_a_record_that_forgets_a_timer_is_seen() -> None:
    plan = Plan(0, BEGAN_MS, 3, 40)
    state, _ = after(EVENT, {}, plan, rows_of(plan, 0, 1, 3)[0], Clock(), {})
    checker = Times(World(state))
    checker.record(3, _record(next_timer_ms(state)))
    with pytest.raises(Stopped, match="next timer"):
        checker.record(3, _record(None))


def test_an_attempt_that_is_told_another_watermark_is_seen() -> None:
    attempt: Any = SimpleNamespace(clock=Clock(5, 3, 9))
    reply: Any = SimpleNamespace(watermark_ms=5, late_watermark_ms=3)
    checker = Times(World({}))
    checker.begun(attempt, reply)
    reply.late_watermark_ms = 5
    with pytest.raises(Stopped, match="watermarks"):
        checker.begun(attempt, reply)
