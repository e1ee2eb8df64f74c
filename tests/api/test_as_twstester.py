"""The same tests on pyspark's TwsTester and on ours: changing the import is all it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pytest
from pyspark.errors import (
    IllegalArgumentException,
    PySparkAssertionError,
    PySparkException,
    PySparkValueError,
)
from pyspark.sql import Row

from statebackend.testing.processor_tester import ProcessorTester
from tests.api.processors import (
    METHODS,
    Alarm,
    AlarmInPandas,
    Clock,
    Methods,
    Refusing,
    RunningCount,
    RunningCountInPandas,
    Words,
)

TwsTester = pytest.importorskip(
    "pyspark.sql.streaming.tws_tester", reason="PySpark 4.1 has no TwsTester"
).TwsTester

Make = Callable[..., Any]


@pytest.fixture(params=[TwsTester, ProcessorTester])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes a tester of either kind."""
    made: list[Any] = []

    def make(*args: Any, **how: Any) -> Any:
        made.append(request.param(*args, **how))
        return made[-1]

    yield make
    for one in made:
        if isinstance(one, ProcessorTester):
            one.close()


def words(*some: str) -> list[Row]:
    return [Row(word=word) for word in some]


def test_rows_of_a_key_are_processed_on_top_of_its_state(make: Make) -> None:
    tester = make(RunningCount())
    assert tester.test("a", words("x", "y")) == [Row(key="a", count=2)]
    assert tester.test("b", words("x")) == [Row(key="b", count=1)]
    assert tester.test("a", words("x")) == [Row(key="a", count=3)]


def test_frames_of_a_key_are_processed_on_top_of_its_state(make: Make) -> None:
    tester = make(RunningCountInPandas())
    tester.testInPandas("a", pd.DataFrame({"word": ["x", "y"]}))
    found = tester.testInPandas("a", pd.DataFrame({"word": ["x"]}))
    pd.testing.assert_frame_equal(found, pd.DataFrame({"key": ["a"], "count": [3]}))


@pytest.mark.parametrize("key", ["a", 7, True, 2.5, b"\x00\xff"])
def test_keys_of_any_plain_type_reach_the_processor_unchanged(make: Make, key: Any) -> None:
    tester = make(RunningCount())
    (row,) = tester.test(key, words("x"))
    assert row.key == key
    assert type(row.key) is type(key)
    assert tester.peekValueState("count", key) == (1,)


def test_a_value_state_can_be_set_and_looked_at(make: Make) -> None:
    tester = make(RunningCount())
    assert tester.peekValueState("count", "a") is None
    tester.updateValueState("count", "a", (10,))
    assert tester.peekValueState("count", "a") == (10,)
    assert tester.peekValueState("count", "b") is None
    assert tester.test("a", words("x")) == [Row(key="a", count=11)]
    assert tester.peekValueState("count", "a") == (11,)


def test_a_list_state_can_be_set_and_looked_at(make: Make) -> None:
    tester = make(Words())
    assert tester.peekListState("words", "a") == []
    tester.updateListState("words", "a", [("x",), ("y",)])
    assert tester.peekListState("words", "a") == [("x",), ("y",)]
    assert tester.test("a", words("z")) == [Row(words=["x", "y", "z"])]
    assert tester.peekListState("words", "a") == [("x",), ("y",), ("z",)]
    tester.updateListState("words", "a", [("w",)])
    assert tester.peekListState("words", "a") == [("w",)]
    tester.updateListState("words", "a", [])
    assert tester.peekListState("words", "a") == []


def test_a_map_state_can_be_set_and_looked_at(make: Make) -> None:
    tester = make(Words())
    assert tester.peekMapState("times", "a") == {}
    tester.updateMapState("times", "a", {("x",): (5,), ("y",): (1,)})
    tester.test("a", words("x", "z"))
    assert tester.peekMapState("times", "a") == {("x",): (6,), ("y",): (1,), ("z",): (1,)}
    tester.updateMapState("times", "a", {("w",): (2,)})
    assert tester.peekMapState("times", "a") == {("w",): (2,)}


def test_a_state_is_deleted_for_one_key(make: Make) -> None:
    tester = make(Words())
    for key in "ab":
        tester.test(key, words("x"))
    tester.deleteState("words", "a")
    tester.deleteState("times", "a")
    assert tester.peekListState("words", "a") == []
    assert tester.peekMapState("times", "a") == {}
    assert tester.peekListState("words", "b") == [("x",)]
    assert tester.peekMapState("times", "b") == {("x",): (1,)}


def test_a_state_that_there_is_not_is_an_assertion_error(make: Make) -> None:
    tester = make(RunningCount())
    for call in (
        lambda: tester.peekValueState("counts", "a"),
        lambda: tester.updateListState("count", "a", [(1,)]),
        lambda: tester.peekMapState("count", "a"),
        lambda: tester.deleteState("counts", "a"),
    ):
        with pytest.raises(AssertionError):
            call()


def test_a_state_that_there_is_not_cannot_be_deleted(make: Make) -> None:
    with pytest.raises(PySparkAssertionError, match="STATE_NOT_EXISTS"):
        make(RunningCount()).deleteState("counts", "a")


def test_initial_rows_are_taken_in_before_the_first_input(make: Make) -> None:
    tester = make(RunningCount(), initialStateRow=[("a", Row(start=10)), ("b", Row(start=20))])
    assert tester.peekValueState("count", "b") == (20,)
    assert tester.test("a", words("x")) == [Row(key="a", count=11)]


def test_initial_frames_are_taken_in_before_the_first_input(make: Make) -> None:
    initial = [("a", pd.DataFrame({"start": [10]}))]
    tester = make(RunningCountInPandas(), initialStatePandas=initial)
    assert tester.testInPandas("a", pd.DataFrame({"word": ["x"]}))["count"].tolist() == [11]


def test_two_kinds_of_initial_state_are_an_assertion_error(make: Make) -> None:
    frame = pd.DataFrame({"start": [10]})
    with pytest.raises(AssertionError, match="both Row and Pandas"):
        make(RunningCount(), initialStateRow=[], initialStatePandas=[("a", frame)])


@pytest.mark.parametrize("rows", [[], [Row(word=None)]])
def test_input_may_be_empty_or_null(make: Make, rows: list[Row]) -> None:
    assert make(RunningCount()).test("a", rows) == [Row(key="a", count=len(rows))]
    frame = pd.DataFrame({"word": [row.word for row in rows]})
    found = make(RunningCountInPandas()).testInPandas("a", frame)
    assert found["count"].tolist() == [len(rows)]


def test_every_method_of_a_state_does_what_sparks_does(make: Make) -> None:
    tester = make(Methods())
    for call in METHODS:
        tester.test("a", [Row(call=call)])
    found = [tester.test("a", [Row(call=call)])[0].found for call in METHODS]
    assert found == [None] * 4 + [True, ("v",), [1, 2, 3], ["x", "z"], [9, 3], True, False, None]


@pytest.mark.parametrize(
    ("how", "at_first", "later"),
    [
        ({}, (-1, -1), None),
        ({"timeMode": "none"}, (-1, -1), None),
        ({"timeMode": "eventTime"}, (0, 0), (0, 5000)),
    ],
)
def test_the_times_are_those_that_were_set(
    make: Make, how: dict[str, Any], at_first: Any, later: Any
) -> None:
    if how.get("timeMode") == "eventTime":
        how = {**how, "eventTimeExtractor": lambda row: row.at}
    tester = make(Clock(), **how)
    (row,) = tester.test("a", [Row(at=10_000)])
    assert (row.now, row.watermark) == at_first
    if later is not None:
        tester.setWatermark(5000)
        (row,) = tester.test("a", [Row(at=10_000)])
        assert (row.now, row.watermark) == later


@pytest.mark.parametrize("mode", ["ProcessingTime", "processingtime", "EventTime"])
def test_timers_fire_once_when_their_time_has_come(make: Make, mode: str) -> None:
    event = mode == "EventTime"
    extractor = {"eventTimeExtractor": lambda row: 10_000} if event else {}
    tester = make(Alarm(), timeMode=mode, **extractor)
    move = tester.setWatermark if event else tester.setProcessingTime
    assert tester.test("a", [Row(at=1000), Row(at=3000)]) == [Row(timers=[1000, 3000])]
    assert tester.test("b", [Row(at=2000), Row(at=2000)]) == [Row(timers=[2000])]
    assert move(999) == []
    assert move(1000) == [Row(key="a", at=1000, rung=1)]
    assert move(1001) == []
    assert tester.test("b", [Row(at=-2000)]) == [Row(timers=[])]
    assert move(9000) == [Row(key="a", at=3000, rung=2)]
    assert tester.test("a", [Row(at=9500)]) == [Row(timers=[9500])]


def test_timers_of_many_keys_all_fire(make: Make) -> None:
    tester = make(Alarm(), timeMode="ProcessingTime")
    for number in range(20):
        tester.test(number, [Row(at=100 + number)])
    found = tester.setProcessingTime(500)
    assert sorted(row.at for row in found) == [100 + number for number in range(20)]
    assert all(row.at == 100 + row.key for row in found)


def test_timers_give_frames_after_frames_came_in(make: Make) -> None:
    tester = make(AlarmInPandas(), timeMode="ProcessingTime")
    assert tester.testInPandas("a", pd.DataFrame({"at": [10, 20]})).empty
    found = tester.setProcessingTime(30)
    pd.testing.assert_frame_equal(found, pd.DataFrame({"key": ["a", "a"], "at": [10, 20]}))
    assert tester.setProcessingTime(40).empty


def test_late_rows_are_dropped(make: Make) -> None:
    tester = make(RunningCount(), timeMode="EventTime", eventTimeExtractor=lambda row: row.at)
    tester.test("a", [Row(at=1), Row(at=2)])
    tester.setWatermark(5)
    assert tester.test("a", [Row(at=4), Row(at=5), Row(at=6)]) == [Row(key="a", count=3)]


def test_late_rows_of_frames_are_dropped(make: Make) -> None:
    tester = make(
        RunningCountInPandas(), timeMode="EventTime", eventTimeExtractor=lambda row: row["at"]
    )
    tester.setWatermark(5)
    found = tester.testInPandas("a", pd.DataFrame({"at": [4, 5, 6]}))
    assert found["count"].tolist() == [1]


def test_time_only_moves_forward(make: Make) -> None:
    tester = make(Alarm(), timeMode="ProcessingTime")
    tester.setProcessingTime(10)
    for wrong in (10, 9):
        with pytest.raises(IllegalArgumentException, match="must move forward"):
            tester.setProcessingTime(wrong)
    tester = make(Alarm(), timeMode="EventTime", eventTimeExtractor=lambda row: row.at)
    with pytest.raises(IllegalArgumentException, match="must move forward"):
        tester.setWatermark(0)


def test_a_time_of_another_mode_cannot_be_set(make: Make) -> None:
    extractor = {"eventTimeExtractor": lambda row: row.at}
    with pytest.raises(PySparkValueError, match=r"UNSUPPORTED_OPERATION.*setProcessingTime"):
        make(Alarm()).setProcessingTime(1)
    with pytest.raises(PySparkValueError, match=r"UNSUPPORTED_OPERATION.*setProcessingTime"):
        make(Alarm(), timeMode="EventTime", **extractor).setProcessingTime(1)
    with pytest.raises(ValueError, match="setWatermark") as caught:
        make(Alarm(), timeMode="ProcessingTime").setWatermark(1)
    assert isinstance(caught.value, PySparkException)
    assert caught.value.getCondition() == "UNSUPPORTED_OPERATION"


def test_event_time_needs_an_extractor(make: Make) -> None:
    with pytest.raises(PySparkValueError, match=r"ARGUMENT_REQUIRED.*eventTimeExtractor"):
        make(Alarm(), timeMode="EventTime")


def test_a_mode_that_there_is_not_is_an_assertion_error(make: Make) -> None:
    with pytest.raises(AssertionError):
        make(Alarm(), timeMode="sometimes")


def test_timers_without_a_time_mode_are_refused(make: Make) -> None:
    with pytest.raises(PySparkValueError, match=r"UNSUPPORTED_OPERATION.*[Tt]imers"):
        make(Alarm()).test("a", [Row(at=1)])


def test_what_the_processor_raises_is_raised(make: Make) -> None:
    tester = make(Refusing())
    with pytest.raises(LookupError, match="told to stop"):
        tester.test("a", words("x", "stop"))
    tester.test("b", words("x"))


def test_the_processor_is_there_to_be_looked_at(make: Make) -> None:
    processor = RunningCount()
    assert make(processor).processor is processor
