"""A user's mistakes, in each API: an error of ours with the user's line, or what is defined."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql import types as T
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from statebackend import TTL
from statebackend.api.processors import CoProcessor, KeyedProcessor
from statebackend.errors import (
    KeyContextError,
    LocalDirError,
    ProcessorError,
    SettingError,
    StateMismatchError,
    UnsupportedQueryError,
    UsageError,
    ValueMismatchError,
)
from statebackend.hashing import key_groups
from statebackend.operators.declared_states import EpochTimes
from statebackend.operators.epoch_phases import StatefulEpoch
from statebackend.operators.errors.spark_errors import TimersRefusedError
from statebackend.operators.input.group_by_key import Groups, group_rows
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.operators.processor_calls import record_keyed_states
from statebackend.operators.stateful_processor import record_states
from statebackend.state.table import MemoryBase, StateTable
from statebackend.testing.tester import ProcessorTester

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
    """The line of this file that ends with a mark, as an error names it."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, start=1) if line.endswith(f"# {mark}")]
    return f"{__file__}:{number} in "


@pytest.fixture(params=FLAVOURS)
def job(request: pytest.FixtureRequest) -> Job:
    return Job(request.param)


@pytest.fixture(params=["keyed", "sides"])
def own(request: pytest.FixtureRequest) -> Job:
    return Job(request.param)


# --- outside its key -----------------------------------------------------------------------------


def test_state_has_no_key_while_the_driver_asks_which_there_are(job: Job) -> None:
    def opening(p: Any, handle: Any) -> None:
        p.value.get()  # opening on the driver

    with pytest.raises(KeyContextError, match="state 'count'") as caught:
        job.run(open=opening)
    assert here("opening on the driver") in str(caught.value)


def test_state_has_no_key_in_init(job: Job) -> None:
    def opening(p: Any, handle: Any) -> None:
        p.value.update((5,))  # opening in a worker

    said = job.mistake(KeyContextError, worker={"open": opening})
    assert "State 'count' was used outside the call for a key at" in said
    assert here("opening in a worker") in said


def test_timers_have_no_key_in_init(job: Job) -> None:
    def opening(p: Any, handle: Any) -> None:
        register(p, 5)  # timers in init

    said = job.mistake(KeyContextError, worker={"open": opening})
    assert "Timers were used outside" in said
    assert here("timers in init") in said
    with pytest.raises(UsageError) as caught:
        job.run(open=opening)
    assert here("timers in init") in str(caught.value)


def register(p: Any, at_ms: Any) -> None:
    set_timer = getattr(p.timers, "registerTimer", None) or p.timers.register
    set_timer(at_ms)


USES: dict[str, Act] = {
    "get": lambda p: p.value.get(),
    "exists": lambda p: p.value.exists(),
    "update": lambda p: p.value.update((1,)),
    "clear": lambda p: p.value.clear(),
    "list get": lambda p: p.list.get(),
    "list put": lambda p: p.list.put([(1, [])]),
    "list append": lambda p: p.list.append((1, [])),
    "list exists": lambda p: p.list.exists(),
    "list clear": lambda p: p.list.clear(),
    "map get": lambda p: p.map.get_value((b"x",)),
    "map update": lambda p: p.map.update_value((b"x",), (1,)),
    "map exists": lambda p: p.map.exists(),
    "map iterator": lambda p: p.map.iterator(),
    "map keys": lambda p: p.map.keys(),
    "map values": lambda p: p.map.values(),
    "map remove": lambda p: p.map.remove_key((b"x",)),
    "map clear": lambda p: p.map.clear(),
    "timers": lambda p: register(p, 5),
}


@pytest.mark.parametrize("use", USES)
def test_state_has_no_key_in_close(job: Job, use: str) -> None:
    def closing(p: Any) -> None:
        USES[use](p)  # closing

    said = job.mistake(KeyContextError, close=closing)
    assert here("closing") in said


@pytest.mark.parametrize("use", ["folded", "fleeting"])
def test_folded_and_fleeting_state_has_no_key_in_close(own: Job, use: str) -> None:
    name = {"folded": "largest", "fleeting": "fleeting"}[use]
    said = own.mistake(KeyContextError, close=lambda p: getattr(p, use).get())
    assert f"State {name!r} was" in said


@pytest.mark.parametrize("use", USES)
def test_what_is_kept_from_an_earlier_batch_reaches_no_key(job: Job, use: str) -> None:
    job.run(remembering)
    earlier = job.processor

    def act(p: Any, key: Any, rows: Any) -> None:
        USES[use](earlier)  # kept from the batch before

    said = job.mistake(KeyContextError, act)
    assert here("kept from the batch before") in said
    assert "for key ('" in said


def test_what_is_kept_from_an_earlier_key_is_the_state_of_the_current_one(job: Job) -> None:
    def act(p: Any, key: Any, rows: Any) -> None:
        p.kept.append(p.value)
        p.kept[0].update((ord(key[0]),))

    job.run(act)
    assert job.counts() == {"a": (97,), "b": (98,)}


def test_a_thread_that_comes_too_late_has_no_key(job: Job) -> None:
    go, raised = threading.Event(), list[BaseException]()

    def late(p: Any) -> None:
        go.wait(30)
        try:
            p.value.update((7,))
        except BaseException as error:
            raised.append(error)

    def act(p: Any, key: Any, rows: Any) -> None:
        p.kept.append(threading.Thread(target=late, args=(p,)))
        p.kept[-1].start()

    job.run(act)
    before = dict(job.base.entries)
    go.set()
    for thread in job.processor.kept:
        thread.join(30)
    assert [type(error) for error in raised] == [KeyContextError] * 2
    assert job.base.entries == before == {}


def test_what_a_thread_raises_during_the_call_shows_both_lines(job: Job) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def elsewhere(p: Any) -> None:
        p.value.update(("x",))  # in the thread

    def act(p: Any, key: Any, rows: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(elsewhere, p).result()  # waits for it

    said = job.mistake(ValueMismatchError, act)
    assert here("in the thread") in said
    assert "state 'count'" in said


# --- generators and iterators --------------------------------------------------------------------


def test_a_generator_that_is_used_up_in_a_later_key_means_that_one(job: Job) -> None:
    def updates(p: Any, n: int) -> Iterator[None]:
        p.value.update((n,))
        yield

    def act(p: Any, key: Any, rows: Any) -> None:
        p.kept.append(updates(p, ord(key[0])))
        if key == ("b",):
            for kept in p.kept:
                next(kept)

    job.run(act)
    assert job.counts() == {"a": None, "b": (98,)}


def test_a_generator_of_state_that_is_used_up_in_close_is_refused(job: Job) -> None:
    def lazily(p: Any) -> Iterator[Any]:
        yield p.value.get()  # in a generator

    def act(p: Any, key: Any, rows: Any) -> None:
        p.kept.append(lazily(p))

    said = job.mistake(KeyContextError, act, close=lambda p: next(p.kept[0]))
    assert here("in a generator") in said


def test_input_that_is_kept_gives_its_own_key_later_and_nothing_is_lost(job: Job) -> None:
    def act(p: Any, key: Any, rows: Any) -> None:
        p.kept.append((key, rows))

    seen = []

    def closing(p: Any) -> None:
        for key, rows in p.kept:
            for some in rows:
                users = some["user"].tolist() if isinstance(some, pd.DataFrame) else [some.user]
                seen.append((key[0], users))

    job.run(act, "aabb", close=closing)
    flat = [(key, user) for key, users in seen for user in users]
    assert flat == [("a", "a"), ("a", "a"), ("b", "b"), ("b", "b")]


def test_what_was_got_from_state_stays_as_it_was(job: Job) -> None:
    def fill(p: Any, key: Any, rows: Any) -> None:
        p.list.put([(n, [key[0]]) for n in range(3)])
        p.map.update_value((key[0].encode(),), (1,))

    def act(p: Any, key: Any, rows: Any) -> None:
        p.kept.append((p.list.get(), p.map.iterator(), p.map.keys(), p.map.values()))
        p.list.clear()
        p.map.clear()

    seen = []
    job.run(fill)
    job.run(act, close=lambda p: seen.extend([list(map(list, four)) for four in p.kept]))
    assert seen == [
        [[(n, [k]) for n in range(3)], [((k.encode(),), (1,))], [(k.encode(),)], [(1,)]]
        for k in "ab"
    ]


class LazyInit(Spark):
    def init(self, handle: Any) -> Any:
        yield handle


class LazyClose(Spark):
    def close(self) -> Any:
        yield


def test_an_init_that_is_a_generator_would_not_run_and_is_refused() -> None:
    with pytest.raises(ProcessorError, match=rf"init\(\).*generator.*{__file__}:"):
        record_states(LazyInit(), "job")


def test_a_close_that_is_a_generator_would_not_run_and_is_refused(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lazy(CLASSES[job.flavour]):  # type: ignore[misc]
        close = LazyClose.close

    monkeypatch.setitem(CLASSES, job.flavour, Lazy)
    with pytest.raises(ProcessorError, match=rf"close\(\).*generator.*{__file__}:"):
        job.run()


def test_a_coroutine_for_open_is_refused() -> None:
    class Lazy(Keyed):
        async def open(self, ctx: Any) -> None:  # type: ignore[override]
            pass

    with pytest.raises(ProcessorError, match=r"open\(\).*coroutine"):
        record_keyed_states(Lazy(), "job")


@pytest.mark.parametrize("flavour", ["rows", "pandas"])
def test_an_initial_state_in_a_generator_would_not_run_and_is_refused(
    flavour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lazy(Spark):
        def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> Any:
            yield self.value.update((1,))

    monkeypatch.setitem(CLASSES, flavour, Lazy)
    with pytest.raises(UsageError, match="handleInitialState"):
        Job(flavour).run(with_initial=True)


# --- names, arity and types ----------------------------------------------------------------------


def test_a_state_of_an_unknown_name_in_a_worker_is_refused(job: Job) -> None:
    def opening(p: Any, handle: Any) -> None:
        get = getattr(handle, "getValueState", None) or handle.value_state
        get("unheard", "n bigint")  # unheard of

    said = job.mistake(StateMismatchError, worker={"open": opening})
    assert "'unheard'" in said
    assert here("unheard of") in said


@pytest.mark.parametrize("name", ["count", "unheard"])
def test_a_state_that_is_asked_for_outside_init_is_refused(job: Job, name: str) -> None:
    def act(p: Any, key: Any, rows: Any) -> None:
        get = getattr(p.handle, "getValueState", None) or p.handle.value_state
        get(name, "n bigint").get()  # too late to ask

    def opening(p: Any, handle: Any) -> None:
        p.handle = handle

    with pytest.raises((StateMismatchError, UsageError)) as caught:
        job.run(act, worker={"open": opening})
    assert not isinstance(caught.value, ProcessorError)
    assert repr(name) in str(caught.value)
    assert here("too late to ask") in str(caught.value)


def test_a_state_that_a_worker_asks_for_twice_is_refused(job: Job) -> None:
    def opening(p: Any, handle: Any) -> None:
        get = getattr(handle, "getValueState", None) or handle.value_state
        p.again = get("count", "n bigint")

    with pytest.raises(StateMismatchError, match="'count'"):
        job.run(worker={"open": opening})


WRONG: dict[str, tuple[Act, str]] = {
    "arity": (lambda p: p.value.update((1, 2)), "state 'count'"),
    "empty": (lambda p: p.value.update(()), "state 'count'"),
    "type": (lambda p: p.value.update(("one",)), "Field 'n' is bigint and cannot hold"),
    "named": (lambda p: p.value.update((1.5,)), "state 'count'"),
    "bool": (lambda p: p.value.update((True,)), "state 'count'"),
    "range": (lambda p: p.value.update((2**63,)), "state 'count'"),
    "scalar": (lambda p: p.value.update(1), "state 'count'"),
    "none": (lambda p: p.value.update(None), "state 'count'"),
    "string": (lambda p: p.value.update("1"), "state 'count'"),
    "dict": (lambda p: p.value.update({"n": 1}), "state 'count'"),
    "list arity": (lambda p: p.list.append((1,)), "state 'seen'"),
    "list type": (lambda p: p.list.append((1, [2])), "state 'seen'"),
    "list of scalars": (lambda p: p.list.put([1, 2]), "state 'seen'"),
    "later in a list": (lambda p: p.list.put([(1, []), ("x", [])]), "state 'seen'"),
    "empty list": (lambda p: p.list.put([]), "list state 'seen'"),
    "extend": (lambda p: extend(p)([(1, []), (None, 5)]), "state 'seen'"),
    "map key": (lambda p: p.map.update_value(("x",), (1,)), "state 'times'"),
    "map key arity": (lambda p: p.map.get_value((b"x", b"y")), "state 'times'"),
    "map key scalar": (lambda p: p.map.get_value(b"x"), "state 'times'"),
    "no map key": (lambda p: p.map.get_value(None), "state 'times'"),
    "no map key to update": (lambda p: p.map.update_value(None, (1,)), "state 'times'"),
    "map value": (lambda p: p.map.update_value((b"x",), ("y",)), "state 'times'"),
}


def extend(p: Any) -> Any:
    return getattr(p.list, "appendList", None) or p.list.extend


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_its_state_is_named(job: Job, what: str) -> None:
    wrong, told = WRONG[what]

    def act(p: Any, key: Any, rows: Any) -> None:
        p.value.update((8,))
        wrong(p)  # does not fit

    said = job.mistake(ValueMismatchError, act)
    assert told in said
    assert said.count("state '") == 1
    assert here("does not fit") in said
    assert "for key ('" in said


@pytest.mark.parametrize("use", ["folded", "fleeting"])
def test_folded_and_fleeting_state_is_named_too(own: Job, use: str) -> None:
    def act(p: Any, key: Any, rows: Any) -> None:
        if use == "folded":
            p.folded.add(("x",))  # folded misfit
        p.fleeting.update(("x",))  # fleeting misfit

    said = own.mistake(ValueMismatchError, act)
    assert "Field 'n' is bigint" in said
    assert f"state {'largest' if use == 'folded' else 'fleeting'!r}".lower() in said
    assert here(f"{use} misfit") in said


def test_a_misfit_in_a_timer_and_in_the_initial_state_is_named(job: Job) -> None:
    def wrong(p: Any, key: Any, *_: Any) -> None:
        p.list.append((1, 5))  # anywhere

    timer = job.mistake(ValueMismatchError, lambda p, k, r: register(p, 5), timer=wrong)
    first = job.mistake(ValueMismatchError, with_initial=True, initial=wrong)
    for said in (timer, first):
        assert "state 'seen'" in said
        assert here("anywhere") in said


def test_who_catches_a_misfit_has_the_state_of_before(job: Job) -> None:
    def fill(p: Any, key: Any, rows: Any) -> None:
        p.value.update((1,))
        p.list.put([(1, ["x"])])
        p.map.update_value((b"x",), (1,))

    def act(p: Any, key: Any, rows: Any) -> None:
        for wrong, _ in WRONG.values():
            with pytest.raises(ValueMismatchError):
                wrong(p)
        with pytest.raises(ValueMismatchError):
            register(p, 1.5)

    job.run(fill)
    before = dict(job.base.entries)
    job.run(act)
    assert job.base.entries == before


# --- timers and times to live --------------------------------------------------------------------


def test_timers_without_a_time_mode_are_refused_at_their_line(job: Job) -> None:
    job.time_mode = "none"

    def act(p: Any, key: Any, rows: Any) -> None:
        register(p, 5)  # no time mode

    sparks = job.flavour in ("rows", "pandas")
    said = job.mistake(TimersRefusedError if sparks else UnsupportedQueryError, act)
    assert here("no time mode") in said
    assert "time_mode='processing' or 'event'" in said

    def opening(p: Any, handle: Any) -> None:
        register(p, 5)  # no time mode in init

    with pytest.raises(UnsupportedQueryError) as caught:
        job.run(open=opening)
    assert here("no time mode in init") in str(caught.value)


@pytest.mark.parametrize(
    "at",
    [
        *(1.5, 5.0, None, "5", [5], 2**63, -(2**63) - 1, np.float64(5)),
        *(datetime(2024, 1, 1, tzinfo=UTC), pd.Timestamp(5), np.datetime64(5, "ms")),
    ],
    ids=repr,
)
def test_a_timer_at_what_is_no_time_is_refused(job: Job, at: Any) -> None:
    def act(p: Any, key: Any, rows: Any) -> None:
        register(p, at)  # no time

    said = job.mistake(ValueMismatchError, act)
    assert f"{at!r}, which is no time in milliseconds" in said
    assert here("no time") in said


@pytest.mark.parametrize("at", [5, np.int64(5), np.int32(5), np.uint8(5), np.uint64(5)], ids=repr)
def test_a_timer_at_any_whole_number_is_one(job: Job, at: Any) -> None:
    fired: list[Any] = []
    job.run(lambda p, k, r: register(p, at), timer=lambda p, k, at_ms: fired.append((*k, at_ms)))
    assert fired == [("a", 5), ("b", 5)]


def test_a_timer_in_the_past_fires_after_the_input_or_in_the_next_batch(job: Job) -> None:
    fired: list[Any] = []

    def again(p: Any, key: Any, at_ms: int) -> None:
        fired.append((job.epoch, *key, at_ms))
        if at_ms == -7:
            register(p, -8)  # earlier still
            register(p, at_ms)  # itself: gone after its call

    job.run(lambda p, k, r: register(p, -7), "a", timer=again)
    job.run(nothing, "", timer=again)
    job.run(nothing, "", timer=again)
    assert fired == [(0, "a", -7), (1, "a", -8)]


def test_a_timer_that_nobody_handles_is_refused(own: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(CLASSES[own.flavour]):  # type: ignore[misc]
        on_timer = KeyedProcessor.on_timer

    monkeypatch.setitem(CLASSES, own.flavour, Deaf)
    with pytest.raises(UsageError, match=r"no on_timer\(\)"):
        own.run(lambda p, key, rows: register(p, 5))


@pytest.mark.parametrize("ttl", [-1, 1.5, "1h", True, np.int64(5), 2**63], ids=repr)
def test_a_time_to_live_that_is_none_is_refused_at_its_line(job: Job, ttl: Any) -> None:
    def opening(p: Any, handle: Any) -> None:
        if isinstance(p, StatefulProcessor):
            handle.getMapState("brief", "k string", "n bigint", ttl)  # Spark's TTL
        else:
            handle.value_state("brief", "n bigint", ttl=TTL(ttl))  # our TTL

    with pytest.raises(SettingError) as caught:
        job.run(open=opening)
    mark = "Spark's TTL" if job.flavour in ("rows", "pandas") else "our TTL"
    assert here(mark) in str(caught.value)


@pytest.mark.parametrize("mode", ["none", "event"])
def test_sparks_time_to_live_needs_processing_time(mode: str) -> None:
    def opening(p: Any, handle: Any) -> None:
        handle.getValueState("brief", "n bigint", 1000)  # needs processing time

    with pytest.raises(UnsupportedQueryError, match="'brief'") as caught:
        Job("rows", mode).run(open=opening)
    assert here("needs processing time") in str(caught.value)
    Job("rows", mode).run(open=lambda p, handle: handle.getValueState("brief", "n bigint", 0))


# --- references ----------------------------------------------------------------------------------


def test_what_state_gave_may_be_changed_without_changing_state(job: Job) -> None:
    def fill(p: Any, key: Any, rows: Any) -> None:
        p.list.put([(n, ["x"]) for n in range(30)])

    def act(p: Any, key: Any, rows: Any) -> None:
        for _ in range(2):
            some = list(p.list.get())
            assert [tags for _, tags in some] == [["x"]] * 30
            for _, tags in some:
                tags.append("y")

    job.run(fill)
    before = dict(job.base.entries)
    job.run(act)
    assert job.base.entries == before


def test_a_row_with_a_list_is_another_object_each_time() -> None:
    class Tagged(KeyedProcessor):
        def open(self, ctx: Any) -> None:
            self.tags = ctx.value_state("tags", "tags array<string>, more map<string,int>")

        def process(self, key: Any, rows: Any, ctx: Any) -> Any:
            if self.tags.get() is None:
                self.tags.update((["x"], {"x": 1}))
            one, two = self.tags.get(), self.tags.get()
            one[0].append("y")
            one[1]["y"] = 2
            yield (two, self.tags.get())

    with ProcessorTester(Tagged()) as tester:
        for _ in range(2):
            assert tester.test("a", [Row(n=1)]) == [((["x"], {"x": 1}),) * 2]


def test_what_was_given_to_state_may_be_changed_afterwards(job: Job) -> None:
    def act(p: Any, key: Any, rows: Any) -> None:
        tags, more, word = ["x"], [(1, ["x"])], bytearray(b"x")
        p.list.append((1, tags))
        extend(p)(more)
        p.map.update_value((word,), (1,))
        tags.append("y")
        more[0][1].append("y")
        more.append((2, []))
        word[0] = ord("y")
        assert list(p.list.get()) == [(1, ["x"]), (1, ["x"])]
        assert list(p.map.iterator()) == [((b"x",), (1,))]

    job.run(act)


def test_a_map_key_that_is_changed_is_another_key(job: Job) -> None:
    def act(p: Any, key: Any, rows: Any) -> None:
        word = bytearray(b"x")
        map_key = (word,)
        assert p.map.get_value(map_key) is None
        p.map.update_value(map_key, (1,))
        word[0] = ord("y")
        assert p.map.get_value(map_key) is None
        p.map.update_value(map_key, (2,))
        assert dict(p.map.iterator()) == {(b"x",): (1,), (b"y",): (2,)}

    job.run(act)


def test_output_may_be_changed_after_it_was_yielded(job: Job) -> None:
    output = T.StructType().add("user", "string").add("all", T.ArrayType(T.LongType()))

    def act(p: Any, key: Any, rows: Any) -> Any:
        p.kept.append(ord(key[0]))
        if job.flavour == "pandas":
            frame = pd.DataFrame({"user": [key[0]], "all": [p.kept]})
            yield frame
            frame["user"] = "changed"
        elif job.flavour == "rows":
            yield Row(user=key[0], all=p.kept)
        else:
            yield (key[0], p.kept)

    found = job.run(act, "abc", output=output)
    assert sorted(found) == [("a", [97]), ("b", [97, 98]), ("c", [97, 98, 99])]


# --- what cannot be shipped ----------------------------------------------------------------------


@pytest.mark.parametrize("flavour", ["rows", "keyed", "sides"])
def test_a_processor_that_cannot_be_pickled_says_which_attribute(flavour: str) -> None:
    processor = CLASSES[flavour]()
    processor.lock = threading.Lock()
    with pytest.raises(ProcessorError, match=r"cannot be shipped.*lock"):
        ProcessorTester(processor)


# --- output --------------------------------------------------------------------------------------

NO_ROWS = [
    [None],
    ["a"],
    [5],
    [{"user": "a", "n": 1}],
    [["a", 1]],
    [("a",)],
    [("a", 1, 2)],
    [("a", "one")],
    [("a", 1.5)],
    [(1, 1)],
    [("a", True)],
    ("a", 1),
    Row(user="a", n=1),
    "ab",
    {"user": "a"},
]


@pytest.mark.parametrize("output", NO_ROWS, ids=repr)
@pytest.mark.parametrize("flavour", ["rows", "keyed", "sides"])
def test_output_that_is_no_row_is_refused(flavour: str, output: Any) -> None:
    said = Job(flavour).mistake(ValueMismatchError, lambda p, key, rows: output)
    assert "'job'" in said
    assert f"({__file__}:" in said


@pytest.mark.parametrize("output", [None, 5, "a", {"user": "a"}, ("a", 1), [1]], ids=repr)
def test_output_that_is_no_frame_is_refused(output: Any) -> None:
    said = Job("pandas").mistake(ValueMismatchError, lambda p, key, rows: [output])
    assert "where an iterator of pandas DataFrames was expected" in said
    assert f"({__file__}:" in said


@pytest.mark.parametrize(
    "frame",
    [
        pd.DataFrame({"user": ["a"]}),
        pd.DataFrame({"user": ["a"], "m": [1]}),
        pd.DataFrame([["a"]]),
        pd.DataFrame({"user": ["a"], "n": ["one"]}),
    ],
    ids=["narrow", "another name", "narrow without names", "another type"],
)
def test_a_frame_that_does_not_fit_is_refused(frame: Any) -> None:
    said = Job("pandas").mistake(ValueMismatchError, lambda p, key, rows: [frame])
    assert "'n'" in said


def test_a_lone_frame_is_refused() -> None:
    frame = pd.DataFrame({"user": ["a"], "n": [1]})
    said = Job("pandas").mistake(ValueMismatchError, lambda p, key, rows: frame)
    assert "pandas DataFrames was expected" in said


@pytest.mark.parametrize("flavour", ["rows", "pandas"])
def test_what_is_no_iterable_is_the_processors_mistake(flavour: str) -> None:
    said = Job(flavour).mistake(ProcessorError, lambda p, key, rows: 5)
    assert "returned what is no iterable of rows ('int' object is not iterable)" in said
    assert "raised" not in said


# --- what the user's code raises -----------------------------------------------------------------


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


def boom(p: Any, *_: Any) -> None:
    raise OSError("boom")  # raised


PHASES: dict[str, dict[str, Any]] = {
    "open": {"worker": {"open": boom}},
    "input": {"act": boom},
    "timer": {"act": lambda p, key, rows: register(p, 5), "timer": boom},
    "initial": {"with_initial": True, "initial": boom},
    "close": {"close": boom},
}


@pytest.mark.parametrize("phase", PHASES)
def test_what_a_phase_raises_is_named_with_its_line(job: Job, phase: str) -> None:
    said = job.mistake(ProcessorError, **PHASES[phase])
    assert "'job'" in said
    assert "raised OSError: boom" in said
    assert here("raised") in said
    assert ("for key" in said) == (phase in ("input", "timer", "initial"))


def test_what_open_raises_on_the_driver_is_named_with_its_line(job: Job) -> None:
    with pytest.raises(ProcessorError, match="OSError: boom") as caught:
        job.run(open=boom)
    assert here("raised") in str(caught.value)


def test_the_cause_is_kept(job: Job) -> None:
    with pytest.raises(ProcessorError) as caught:
        job.run(boom)
    assert isinstance(caught.value.__cause__, OSError)

    def misfit(p: Any, key: Any, rows: Any) -> None:
        p.value.update(("x",))

    with pytest.raises(ValueMismatchError) as misfitting:
        job.run(misfit)
    assert isinstance(misfitting.value.__cause__, ValueMismatchError)


def test_a_generator_that_raises_after_its_output_fails_the_batch(job: Job) -> None:
    def act(p: Any, key: Any, rows: Any) -> Any:
        yield pd.DataFrame({"user": ["a"], "n": [1]}) if job.flavour == "pandas" else ("a", 1)
        p.value.update((9,))
        raise OSError("boom")  # after its output

    said = job.mistake(ProcessorError, act)
    assert here("after its output") in said


def test_an_error_that_cannot_be_shown_is_named_by_its_type(job: Job) -> None:
    def act(p: Any, key: Any, rows: Any) -> None:
        raise Speechless  # without words

    said = job.mistake(ProcessorError, act)
    assert "raised Speechless for key" in said
    assert here("without words") in said


def test_a_very_long_key_is_cut_short() -> None:
    def act(p: Any, key: Any, rows: Any) -> None:
        raise OSError("boom")

    long = Job("rows")
    groups = long.groups
    long.groups = lambda users: groups([user * 10_000 for user in users])  # type: ignore
    with pytest.raises(ProcessorError) as caught:
        long.run(act)
    assert len(str(caught.value)) < 1000


def test_the_handler_and_its_helper_are_shown_however_deep_pandas_goes() -> None:
    def helper(frame: Any) -> Any:
        return frame["nobody"]  # a column that is not there

    def act(p: Any, key: Any, rows: Any) -> Any:
        for frame in rows:
            yield helper(frame)  # asks the helper

    said = Job("pandas").mistake(ProcessorError, act)
    assert here("a column that is not there") in said
    assert here("asks the helper") in said


def test_a_failure_of_the_machine_is_not_blamed_on_the_processor(job: Job) -> None:
    error = LocalDirError("The disk is full.", todo="Make room.")

    def act(p: Any, key: Any, rows: Any) -> None:
        raise error

    with pytest.raises(LocalDirError) as caught:
        job.run(act)
    assert caught.value is error


def test_on_the_real_store_nothing_of_a_failed_batch_is_left() -> None:
    def act(p: Any, key: Any, rows: Any) -> None:
        remembering(p, key, rows)
        p.list.append((1, ["x"]))
        p.map.update_value((b"x",), (1,))
        register(p, 500)
        if any(row.n < 0 for row in rows):
            p.fleeting.update(("x",))

    with ProcessorTester(Keyed(act), timeMode="processing") as tester:
        tester.test("a", [Row(n=1)])
        for _ in range(2):
            with pytest.raises(ValueMismatchError, match="state 'fleeting'"):
                tester.test("a", [Row(n=-1)])
            assert tester.peekValueState("count", "a") == (1,)
            assert tester.peekListState("seen", "a") == [(1, ["x"])]
            assert tester.peekTimers("a") == [500]
            tester.restart()
