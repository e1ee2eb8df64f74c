"""ProcessorTester: what outlives a restart, another number of subtasks, or a failure."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row

from statebackend.api.context import ProcessorContext
from statebackend.errors import (
    ParallelismError,
    ProcessorError,
    SettingError,
    UnsupportedQueryError,
    UsageError,
    error_for_code,
)
from statebackend.operators.errors import spark_errors as sparkerrors
from statebackend.testing.processor_tester import ProcessorTester
from tests.api.processors import (
    Alarm,
    Clock,
    Forgetting,
    Refusing,
    Remembering,
    Reminder,
    RunningCount,
    Totals,
    Words,
)
from tests.api.tester_inputs import Leaky, amounts, stored, words

# --- restart and rescale -------------------------------------------------------------------------


def test_nothing_but_state_survives_a_restart() -> None:
    with ProcessorTester(Leaky()) as tester:
        before = tester.processor
        assert tester.test("a", words("x")) == [(1, 1)]
        assert tester.test("a", words("x")) == [(2, 2)]
        tester.restart()
        assert tester.processor is not before
        assert tester.test("a", words("x")) == [(1, 3)]


def test_timers_and_times_survive_a_restart() -> None:
    with ProcessorTester(Alarm(), timeMode="ProcessingTime") as tester:
        tester.test("a", [Row(at=1000)])
        tester.setProcessingTime(500)
        tester.restart()
        assert tester.peekTimers("a") == [1000]
        assert tester.setProcessingTime(1001) == [Row(key="a", at=1000, rung=1)]
        tester.restart()
        assert tester.setProcessingTime(2000) == []


def test_a_state_that_init_deletes_is_empty_after_a_restart() -> None:
    class Starting(RunningCount):
        def init(self, handle: Any) -> None:
            handle.deleteIfExists("count")
            super().init(handle)
            self.kept = handle.getValueState("kept", "n bigint")

    with ProcessorTester(Starting()) as tester:
        for _ in range(2):
            for key in "abc":
                tester.test(key, words("x"))
                tester.updateValueState("kept", key, (7,))
        assert tester.peekValueState("count", "a") == (2,)
        tester.restart()
        assert tester.test("a", words("x")) == [Row(key="a", count=1)]
        assert tester.peekValueState("count", "b") is None
        assert tester.peekValueState("kept", "b") == (7,)


@pytest.mark.parametrize("sizes", [[4], [3, 7], [5, 2, 1], [16, 1]])
def test_keys_keep_their_state_over_any_number_of_subtasks(sizes: list[int]) -> None:
    keys = [f"key-{n}" for n in range(40)]
    with ProcessorTester(Words()) as tester:
        for key in keys:
            tester.test(key, words(key, "x"))
        for step, size in enumerate(sizes, start=1):
            tester.rescale(size)
            for key in keys:
                assert tester.peekMapState("times", key) == {(key,): (1,), ("x",): (step,)}
                (row,) = tester.test(key, words("x"))
                assert row.words == sorted([key] + ["x"] * (step + 1))


def test_state_is_spread_over_the_subtasks() -> None:
    with ProcessorTester(RunningCount()) as tester:
        for key in range(60):
            tester.test(key, words("x"))
        tester.rescale(3)
        sizes = [len(list(store.scan())) for store in tester._operator.stores]
        assert sum(sizes) == 60
        assert min(sizes) > 5


def test_timers_and_expiry_are_rescaled_too() -> None:
    with ProcessorTester(Reminder(), timeMode="ProcessingTime") as tester:
        for key in range(30):
            tester.test(key, [Row(at=1000 + key)])
        tester.rescale(4)
        found = tester.setProcessingTime(5000)
        assert sorted(found) == [(key, 1000 + key, 5000, -1, 1) for key in range(30)]
    with ProcessorTester(Forgetting()) as tester:
        for key in range(30):
            tester.test(key, amounts(1))
        tester.rescale(4)
        for now_ms in range(100_000, 100_010):
            tester.setProcessingTime(now_ms)
        assert stored(tester) == 0


def test_a_failure_in_one_subtask_leaves_all_of_them_as_they_were() -> None:
    class Explosive(Reminder):
        def on_timer(self, key: Any, at_ms: int, ctx: ProcessorContext) -> Any:
            if key == (7,) and ctx.processing_time_ms < 200:
                raise OSError("boom")
            return [(*key, at_ms)]

    with ProcessorTester(Explosive(), timeMode="ProcessingTime") as tester:
        for key in range(20):
            tester.test(key, [Row(at=50)])
        tester.rescale(5)
        with pytest.raises(OSError, match="boom"):
            tester.setProcessingTime(100)
        assert sorted(tester.setProcessingTime(300)) == [(key, 50) for key in range(20)]


@pytest.mark.parametrize("size", [0, -1, 129])
def test_an_impossible_number_of_subtasks_is_refused(size: int) -> None:
    with ProcessorTester(RunningCount()) as tester:
        tester.test("a", words("x"))
        with pytest.raises(ParallelismError):
            tester.rescale(size)
        assert tester.peekValueState("count", "a") == (1,)


# --- failures ------------------------------------------------------------------------------------


def test_nothing_of_a_batch_counts_if_the_processor_raises() -> None:
    with ProcessorTester(Refusing()) as tester:
        tester.test("a", words("x"))
        with pytest.raises(LookupError, match="told to stop"):
            tester.test("a", words("y", "stop"))
        assert tester.peekValueState("count", "a") == (1,)


def test_a_stop_iteration_of_the_processors_is_no_end_of_anything() -> None:
    class Stopping(Leaky):
        def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> Any:
            next(iter(()))

    with ProcessorTester(Stopping()) as tester, pytest.raises(StopIteration):
        tester.test("a", words("x"))


def test_a_tester_whose_start_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unready(Leaky):
        def on_initial(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
            raise OSError("not today")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="not today"):
        ProcessorTester(Unready(), initialStateRow=[("a", Row(x=1))])
    assert not list(tmp_path.iterdir())


def test_a_processor_that_cannot_be_shipped_is_refused() -> None:
    processor = RunningCount()
    processor.rows = (row for row in ())  # type: ignore[attr-defined]
    with pytest.raises(ProcessorError, match="cannot be shipped"):
        ProcessorTester(processor)


def test_what_is_no_processor_is_refused() -> None:
    for wrong in (object(), Totals, None):
        with pytest.raises(UsageError):
            ProcessorTester(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "how",
    [
        {"timeMode": "sometimes"},
        {"outputMode": "Backward"},
    ],
)
def test_arguments_that_mean_nothing_are_refused(how: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        ProcessorTester(RunningCount(), **how)


def test_errors_that_are_sparks_too_travel_as_ours_do() -> None:
    for name in sparkerrors.__all__:
        kind = getattr(sparkerrors, name)
        error = pickle.loads(pickle.dumps(kind("It happened.", todo="Do this.")))
        assert type(error) is kind
        assert str(error).startswith(f"[{kind.code}] ")
        assert str(error).endswith("It happened. Do this.")
        assert (error.what, error.todo) == ("It happened.", "Do this.")
        # By its code, an error of ours is found, and not one of a test.
        assert type(error_for_code(kind.code, "", "")).__module__ == "statebackend.errors"


def test_sparks_ttl_needs_processing_time_as_in_spark() -> None:
    with pytest.raises(UnsupportedQueryError, match="TTL"):
        ProcessorTester(Remembering())


def test_if_all_rows_are_late_the_processor_is_not_called() -> None:
    with ProcessorTester(
        Clock(), timeMode="EventTime", eventTimeExtractor=lambda row: row.at
    ) as tester:
        tester.setWatermark(10)
        assert tester.test("a", [Row(at=10), Row(at=3)]) == []
        assert tester.test("a", [Row(at=11)]) != []
