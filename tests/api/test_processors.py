"""Processors of our own: what they may do when, and which mistakes are refused where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import Row

from statebackend.api.context import ProcessorContext
from statebackend.api.processors import CoProcessor, KeyedProcessor
from statebackend.errors import (
    KeyContextError,
    ProcessorError,
    SchemaError,
    SettingError,
    StateBackendError,
    StateMismatchError,
    UnsupportedQueryError,
    UnsupportedTypeError,
    UsageError,
    ValueMismatchError,
)
from statebackend.operators.processor_calls import has_initial, record_keyed_states
from statebackend.state.ttl_cells import TTL
from statebackend.testing.processor_tester import ProcessorTester
from tests.api.processors import Pairs, Reminder, Totals


class Made(KeyedProcessor):
    """Opens and processes by the functions it is given."""

    def __init__(
        self, open: Callable[..., Any] | None = None, process: Callable[..., Any] | None = None
    ) -> None:
        self.opening, self.processing = open, process

    def open(self, ctx: ProcessorContext) -> None:
        self.state = ctx.value_state("state", "n bigint")
        if self.opening is not None:
            self.opening(self, ctx)

    def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> Any:
        return None if self.processing is None else self.processing(self, key, rows, ctx)


def refused(opening: Callable[..., Any], time_mode: str = "none") -> Exception:
    with pytest.raises(StateBackendError) as caught:
        record_keyed_states(Made(opening), "clicks", time_mode=time_mode)
    return caught.value


# --- on the driver -------------------------------------------------------------------------------


def test_the_driver_learns_every_state_from_open() -> None:
    found = record_keyed_states(Totals(), "totals").declared
    assert {name: one.kind for name, one in found.items()} == {
        "last": "value",
        "all": "list",
        "times": "map",
        "largest": "reducing",
        "mean": "aggregating",
    }
    assert found["times"].key_schema
    assert all(one.time_to_live is None for one in found.values())


def test_a_ttl_is_recorded_in_every_time_mode() -> None:
    def opening(self: Made, ctx: ProcessorContext) -> None:
        ctx.list_state("kept", "n bigint", ttl=TTL(5000, update="read"))

    for mode in ("none", "processing", "event"):
        found = record_keyed_states(Made(opening), "clicks", time_mode=mode).declared
        assert found["kept"].time_to_live == TTL(5000, update="read")


@pytest.mark.parametrize("ttl", [5, 5000, "1h", {"ms": 5}])
def test_a_ttl_that_is_none_is_refused(ttl: Any) -> None:
    error = refused(lambda self, ctx: ctx.value_state("x", "n bigint", ttl=ttl))
    assert isinstance(error, SettingError)
    assert "'x'" in str(error)


@pytest.mark.parametrize(
    ("opening", "kind"),
    [
        (lambda self, ctx: ctx.value_state("state", "n bigint"), StateMismatchError),
        (lambda self, ctx: ctx.list_state("state", "n bigint"), StateMismatchError),
        (lambda self, ctx: ctx.value_state("", "n bigint"), StateMismatchError),
        (lambda self, ctx: ctx.value_state(5, "n bigint"), StateMismatchError),
        (lambda self, ctx: ctx.value_state("x", "n bigant"), SchemaError),
        (lambda self, ctx: ctx.value_state("x", "n bigint, n bigint"), SchemaError),
        (lambda self, ctx: ctx.value_state("x", 5), SchemaError),
        (lambda self, ctx: ctx.map_state("x", "m map<int,int>", "n int"), UnsupportedTypeError),
        (lambda self, ctx: ctx.map_state("x", None, "n int"), UsageError),
        (lambda self, ctx: ctx.reducing_state("x", "n int", 5), SettingError),
        (
            lambda self, ctx: ctx.aggregating_state("x", "n int", create=(0,), add=max),
            SettingError,
        ),
        (lambda self, ctx: ctx.value_stat("x", "n int"), ProcessorError),
        (lambda self, ctx: 1 / 0, ProcessorError),
    ],
)
def test_mistakes_in_open_are_refused_on_the_driver(
    opening: Callable[..., Any], kind: type[Exception]
) -> None:
    assert isinstance(refused(opening), kind)


@pytest.mark.parametrize(
    "use",
    [
        lambda self, ctx: self.state.get(),
        lambda self, ctx: self.state.update((1,)),
        lambda self, ctx: ctx.timers.register(5),
        lambda self, ctx: ctx.timers.list(),
    ],
)
def test_open_belongs_to_no_key(use: Callable[..., Any]) -> None:
    error = refused(use, time_mode="processing")
    assert isinstance(error, KeyContextError)
    assert "open()" in str(error)


def test_timers_without_a_time_mode_are_refused() -> None:
    assert isinstance(refused(lambda self, ctx: ctx.timers.register(5)), UnsupportedQueryError)
    with ProcessorTester(Reminder()) as tester, pytest.raises(UnsupportedQueryError):
        tester.test("a", [Row(at=5)])


def test_what_is_no_processor_is_refused() -> None:
    with pytest.raises(UsageError, match="class Totals"):
        record_keyed_states(Totals, "totals")
    with pytest.raises(UsageError, match="given a dict"):
        record_keyed_states({}, "totals")


def test_a_processor_that_cannot_be_pickled_is_refused() -> None:
    processor = Totals()
    processor.rows = (row for row in ())  # type: ignore[attr-defined]
    with pytest.raises(ProcessorError, match="cannot be shipped"):
        ProcessorTester(processor)


def test_a_method_with_other_arguments_is_refused_on_the_driver() -> None:
    class Short(KeyedProcessor):
        def process(self, key: Any, rows: Any) -> Any:  # type: ignore[override]
            return []

    class Renamed(CoProcessor):
        def process_left(self, k: Any, some: Any, context: Any) -> Any:
            return []

        def process_right(self, *arguments: Any) -> Any:
            return []

        def on_timer(self, key: Any) -> Any:  # type: ignore[override]
            return []

    with pytest.raises(ProcessorError, match=r"Short\.process\(key: .*, rows: .*\).*3 arguments"):
        record_keyed_states(Short(), "x")
    with pytest.raises(ProcessorError, match=r"Renamed\.on_timer"):
        record_keyed_states(Renamed(), "x")


def test_a_processor_without_process_cannot_be_made() -> None:
    class Empty(KeyedProcessor):
        pass

    with pytest.raises(TypeError, match="process"):
        Empty()  # type: ignore[abstract]


def test_it_is_known_who_takes_in_an_initial_state() -> None:
    assert has_initial(Totals())
    assert has_initial(Pairs())
    assert not has_initial(Reminder())


# --- in a worker ---------------------------------------------------------------------------------


def ran(process: Callable[..., Any], **how: Any) -> list[Any]:
    with ProcessorTester(Made(process=process), **how) as tester:
        return tester.test("a", [Row(n=1), Row(n=2)])


@pytest.mark.parametrize(
    "process",
    [
        lambda self, key, rows, ctx: [(key[0], row.n) for row in rows],
        lambda self, key, rows, ctx: ((key[0], row.n) for row in rows),
        lambda self, key, rows, ctx: tuple([(key[0], row.n) for row in rows]),
        lambda self, key, rows, ctx: iter([(key[0], row.n) for row in rows]),
        lambda self, key, rows, ctx: {(key[0], row.n): None for row in rows}.keys(),
        lambda self, key, rows, ctx: [Row(k=key[0], n=row.n) for row in rows],
    ],
)
def test_rows_may_come_in_any_iterable(process: Callable[..., Any]) -> None:
    assert ran(process) == [("a", 1), ("a", 2)]


def test_no_output_may_be_none() -> None:
    assert ran(lambda self, key, rows, ctx: None) == []
    assert ran(lambda self, key, rows, ctx: ()) == []


@pytest.mark.parametrize(
    "output", [("a", 1), Row(k="a", n=1), "a", b"a", {"k": "a"}, 5, ("a", (1, 2)), object()]
)
def test_a_lone_row_or_no_iterable_is_refused(output: Any) -> None:
    def process(self: Made, key: Any, rows: Any, ctx: ProcessorContext) -> Any:
        return 5 if type(output) is object else output

    with pytest.raises(ValueMismatchError, match=r"process\(\).*no iterable of rows") as caught:
        ran(process)
    assert f"{__file__}:" in str(caught.value)


def test_a_lone_row_from_a_timer_is_refused_too() -> None:
    class Lone(Reminder):
        def on_timer(self, key: Any, at_ms: int, ctx: ProcessorContext) -> Any:
            return (key[0], at_ms)

    with ProcessorTester(Lone(), timeMode="ProcessingTime") as tester:
        tester.test("a", [Row(at=5)])
        with pytest.raises(ValueMismatchError, match=r"on_timer\(\)"):
            tester.setProcessingTime(6)


def test_a_state_asked_for_outside_open_is_refused() -> None:
    def process(self: Made, key: Any, rows: Any, ctx: ProcessorContext) -> None:
        ctx.value_state("late", "n bigint")

    with pytest.raises(UsageError, match=r"'late'.*outside open\(\)"):
        ran(process)


def test_states_that_differ_from_the_drivers_are_refused() -> None:
    def opening(self: Made, ctx: ProcessorContext) -> None:
        ctx.value_state("more", "n bigint")

    with ProcessorTester(Made()) as tester:
        tester._operator.processors[0].opening = opening
        with pytest.raises(StateMismatchError, match="'more'"):
            tester.test("a", [Row(n=1)])


def test_state_used_outside_its_key_is_refused() -> None:
    kept: list[Any] = []

    class Keeping(Made):
        def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> Any:
            kept.append(self.state)
            kept.append(ctx.timers)

    tester = ProcessorTester(Made(), timeMode="ProcessingTime")
    tester._operator.processors[0] = Keeping()
    tester.test("a", [Row(n=1)])
    with pytest.raises(KeyContextError):
        kept[0].get()
    with pytest.raises(KeyContextError):
        kept[1].register(5)
    tester.close()


def test_a_timer_that_nobody_handles_is_refused() -> None:
    def process(self: Made, key: Any, rows: Any, ctx: ProcessorContext) -> None:
        ctx.timers.register(5)

    with ProcessorTester(Made(process=process), timeMode="ProcessingTime") as tester:
        tester.test("a", [Row(n=1)])
        with pytest.raises(UsageError, match=r"on_timer\(\)"):
            tester.setProcessingTime(6)


def test_an_initial_state_gives_no_output() -> None:
    class Yielding(Made):
        def on_initial(self, key: Any, rows: Any, ctx: ProcessorContext) -> Any:
            yield key

    with pytest.raises(ValueMismatchError, match="on_initial"):
        ProcessorTester(Yielding(), initialStateRow=[("a", Row(n=1))])


def test_the_context_knows_the_times_of_the_epoch() -> None:
    def process(self: Made, key: Any, rows: Any, ctx: ProcessorContext) -> Any:
        return [(ctx.epoch, ctx.processing_time_ms, ctx.watermark_ms)]

    with ProcessorTester(Made(process=process)) as tester:
        tester.setProcessingTime(70)
        (first,) = tester.test("a", [Row(n=1)])
        (second,) = tester.test("a", [Row(n=1)])
        assert first[1:] == second[1:] == (70, -1)
        assert second[0] == first[0] + 1
    how: dict[str, Any] = {"timeMode": "EventTime", "eventTimeExtractor": lambda row: 1000}
    with ProcessorTester(Made(process=process), **how) as tester:
        assert tester.test("a", [Row(n=1)])[0][1:] == (0, 0)
        tester.setWatermark(50)
        assert tester.test("a", [Row(n=1)])[0][1:] == (0, 50)


def test_the_order_of_calls_is_that_of_an_epoch() -> None:
    class Telling(KeyedProcessor):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def open(self, ctx: ProcessorContext) -> None:
            self.calls.append("open")

        def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> Any:
            self.calls.append("process")
            ctx.timers.register(-5)
            yield key
            self.calls.append("processed")

        def on_timer(self, key: Any, at_ms: int, ctx: ProcessorContext) -> None:
            self.calls.append(f"timer {at_ms}")

        def on_initial(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
            self.calls.append("initial")

        def close(self) -> None:
            self.calls.append("close")

    initial = [("b", Row(n=1))]
    with ProcessorTester(Telling(), initialStateRow=initial, timeMode="processing") as tester:
        assert tester.processor.calls == ["open", "initial", "close"]
        tester.processor.calls.clear()
        tester.test("a", [Row(n=1)])
        assert tester.processor.calls == ["open", "process", "processed", "timer -5", "close"]
