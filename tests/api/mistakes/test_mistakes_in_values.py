"""Names, values, timers and times to live that do not fit: an error with the user's line."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from statebackend import TTL
from statebackend.api.processors import KeyedProcessor
from statebackend.errors import (
    ProcessorError,
    SettingError,
    StateMismatchError,
    UnsupportedQueryError,
    UsageError,
    ValueMismatchError,
)
from statebackend.operators.errors.spark_errors import TimersRefusedError
from tests.api.mistakes.any_processor import CLASSES, Act, Job, extend, here, nothing, register

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
    names = "timeMode='ProcessingTime' or 'EventTime'", "time_mode='processing' or 'event'"
    assert names[0 if sparks else 1] in said

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
