"""What a processor puts out or raises, and what cannot be shipped: an error names it."""

from __future__ import annotations

import threading
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import Row

from statebackend.errors import LocalDirError, ProcessorError, ValueMismatchError
from statebackend.testing.processor_tester import ProcessorTester
from tests.api.mistakes import any_processor
from tests.api.mistakes.any_processor import CLASSES, Job, Keyed, here, register, remembering

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
    assert f"({any_processor.__file__}:" in said


@pytest.mark.parametrize("output", [None, 5, "a", {"user": "a"}, ("a", 1), [1]], ids=repr)
def test_output_that_is_no_frame_is_refused(output: Any) -> None:
    said = Job("pandas").mistake(ValueMismatchError, lambda p, key, rows: [output])
    assert "where an iterator of pandas DataFrames was expected" in said
    assert f"({any_processor.__file__}:" in said


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
