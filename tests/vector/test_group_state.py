"""Functions of applyInPandasWithState, without Spark: what they see, and what becomes of state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import PySparkTypeError
from pyspark.sql.streaming.state import GroupState

from statebackend.errors import ProcessorError, ValueMismatchError
from statebackend.operators.pandas_frames import group_state_processor
from statebackend.operators.pandas_frames.frame_reader import empty_frames
from statebackend.operators.pandas_frames.group_state import KeyState, StateTimes, timer_ms
from statebackend.operators.pandas_frames.group_state_processor import FunctionPlan, StateFunction
from statebackend.schema.ddl import parse_ddl
from statebackend.testing.processor_tester import ProcessorTester

INPUT, OUTPUT = "k string, v int, op string", "k string, n bigint, what string"
MODES = {"ProcessingTimeTimeout": "ProcessingTime", "EventTimeTimeout": "EventTime"}
Model = dict[str, tuple[int | None, int | None]]


def trying(function: Any, timeout: str = "NoTimeout", **options: Any) -> ProcessorTester:
    plan = FunctionPlan(
        uid="f",
        input_schema=parse_ddl(options.pop("schema", INPUT)),
        key_positions=(0,),
        output_schema=parse_ddl(OUTPUT),
        state_schema=parse_ddl("n bigint"),
        timeout_conf=timeout,
        **options,
    )
    return ProcessorTester(
        StateFunction(function, plan),
        timeMode=MODES.get(timeout, "None"),
        keySchema="k string",
        outputSchema=OUTPUT,
    )


def rows(*given: tuple[str, int | None, str]) -> pa.Table:
    keys, values, ops = zip(*given, strict=True)
    return pa.table({"k": keys, "v": pa.array(values, pa.int32()), "op": ops})


def told(table: pa.Table) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in table.to_pylist())


def obeying(key: Any, frames: Any, state: Any) -> Any:
    """Does what the rows' letters say: u(pdate), r(emove), t(imeout in 10 ms), T (in 1000 ms)."""
    before, count, ops = state.getOption, 0, ""
    for frame in frames:
        count += len(frame)
        ops += "".join(frame["op"])
    if state.hasTimedOut:
        ops = "" if before is None else ("", "u", "r", "t", "ut")[before[0] % 5]
    for op in ops:
        if op == "u":
            state.update(((before or (0,))[0] + count + 1,))
        elif op == "r":
            state.remove()
        else:
            state.setTimeoutDuration(10 if op == "t" else 1000)
    what = f"{before} {state.hasTimedOut} {count}"
    yield pd.DataFrame({"k": [key[0]], "n": [count], "what": [what]})


def by_the_book(model: Model, batch: list[tuple[str, int, str]], now_ms: int) -> list[Any]:
    """The same, one key after the other, as Spark's documentation and its engine have it."""
    found, given = [], dict[str, tuple[int, str]]()
    for key, _, op in batch:
        count, ops = given.get(key, (0, ""))
        given[key] = count + 1, ops + op

    def call(key: str, count: int, ops: str, timed_out: bool) -> None:
        before, at_ms = model.pop(key, (None, None))
        if timed_out:
            ops = "" if before is None else ("", "u", "r", "t", "ut")[before % 5]
        value, new_ms = before, None
        for op in ops:
            if op == "u":
                value = (before or 0) + count + 1
            elif op == "r":
                value = None
            else:
                new_ms = now_ms + (10 if op == "t" else 1000)
        shown = None if before is None else (before,)
        found.append((key, count, f"{shown} {timed_out} {count}"))
        new_ms = new_ms if ops else at_ms  # nothing was written: it stays in force
        if value is not None or new_ms is not None:
            model[key] = value, new_ms

    for key, (count, ops) in given.items():
        call(key, count, ops, False)
    for key in [k for k, (_, at_ms) in model.items() if at_ms is not None and at_ms < now_ms]:
        call(key, 0, "", True)
    return sorted(found)


@pytest.mark.parametrize("seed", range(6))
def test_calls_and_state_are_those_of_one_key_after_the_other(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_state_processor, "_CHUNK_ROWS", 7 if seed % 2 else 16_384)
    monkeypatch.setattr(group_state_processor, "_CHANGED_BYTES", 50 if seed % 2 else 1 << 24)
    drawn, model = random.Random(seed), Model()
    with trying(obeying, "ProcessingTimeTimeout") as trial:
        for batch in range(25):
            now_ms = 1000 + 7 * batch + 1000 * (batch > 20)
            some = [
                (f"k{drawn.randrange(12)}", 1, drawn.choice(["", "u", "u", "r", "t", "T"]))
                for _ in range(drawn.randrange(1, 25))
            ]
            timed = trial.setProcessingTime(now_ms)
            found = told(timed) if timed is not None else []
            assert found == by_the_book(model, [], now_ms)
            found = told(trial.testBatch(rows(*some)))
            assert found == by_the_book(model, some, now_ms)
            if batch % 9 == 4:
                # A batch runs only where it has rows, so several subtasks are for in between.
                trial.restart()
                trial.rescale(4)
                trial.rescale(1)
        for key in (f"k{n}" for n in range(12)):
            value, at_ms = model.get(key, (None, None))
            assert trial.peekValueState("state", key) == (None if value is None else (value,))
            assert trial.peekValueState("timeout", key) == (None if at_ms is None else (at_ms,))
            assert trial.peekTimers(key) == ([] if at_ms is None else [at_ms + 1])


def shown(key: Any, frames: Any, state: Any) -> Any:
    what = []
    for frame in frames:
        what.append(f"{list(frame.dtypes)} {frame.index} {frame['v'].tolist()}")
        frame["v"] = 99  # its own
    kinds = [type(value).__name__ for value in key]
    yield pd.DataFrame({"k": [key[0]], "n": [len(what)], "what": [f"{kinds} {what}"]})


def test_numbers_keep_their_width_and_nulls_touch_their_own_key_only() -> None:
    with trying(shown) as trial:
        found = told(trial.testBatch(rows(("a", 1, ""), ("b", None, ""), ("a", 2, ""))))
    index, types = "RangeIndex(start=0, stop={}, step=1)", "[dtype('O'), dtype('{}'), dtype('O')]"
    of_a = f"{types.format('int32')} {index.format(2)} [1, 2]"
    of_b = f"{types.format('float64')} {index.format(1)} [nan]"
    assert found == [("a", 1, f"['str'] {[of_a]}"), ("b", 1, f"['str'] {[of_b]}")]


def test_a_key_of_many_rows_comes_in_frames_as_long_as_spark_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_state_processor, "_CHUNK_ROWS_MIN", 1)

    def lengths(key: Any, frames: Any, state: Any) -> Any:
        what = str([len(frame) for frame in frames if not frame.empty])
        yield pd.DataFrame({"k": [key[0]], "n": [0], "what": [what]})

    with trying(lengths, frame_rows=4) as trial:
        some = [("a", 1, "")] * 9 + [("b", 2, "")] * 4 + [("c", 3, "")]
        assert [row[2] for row in told(trial.testBatch(rows(*some)))] == ["[4, 4, 1]", "[4]", "[1]"]


def test_what_a_function_does_not_read_is_not_made() -> None:
    def idle(key: Any, frames: Any, state: Any) -> Any:
        return []

    with trying(idle) as trial:
        assert told(trial.testBatch(rows(("a", 1, "")))) == []
        assert trial.peekValueState("state", "a") is None


def test_output_is_found_by_name_by_place_or_refused() -> None:
    outputs: dict[str, Any] = {
        "order": lambda: [pd.DataFrame({"what": ["w"], "n": [1], "k": ["x"]})],
        "place": lambda: [pd.DataFrame([["x", 1, "w"]])],
        "empty": lambda: [pd.DataFrame(), pd.DataFrame({"k": ["x"], "n": [1], "what": ["w"]})],
        "fewer": lambda: [pd.DataFrame({"k": ["x"], "n": [1]})],
        "other": lambda: [pd.DataFrame({"k": ["x"], "n": [1], "that": ["w"]})],
        "frame": lambda: pd.DataFrame({"k": ["x"]}),
        "list": lambda: [["x", 1, "w"]],
        "none": lambda: None,
        "raises": lambda: 1 // 0,
    }

    def function(key: Any, frames: Any, state: Any) -> Any:
        return outputs[key[0]]()

    plain = {"order", "place", "empty"}
    with trying(function) as trial:
        for name in outputs:
            if name in plain:
                assert told(trial.testBatch(rows((name, 1, "")))) == [("x", 1, "w")]
                continue
            with pytest.raises((ValueMismatchError, ProcessorError, ZeroDivisionError, TypeError)):
                trial.testBatch(rows((name, 1, "")))


def test_a_value_that_does_not_fit_is_refused_with_the_key() -> None:
    def function(key: Any, frames: Any, state: Any) -> Any:
        state.update(("text",))
        yield from ()

    with trying(function) as trial, pytest.raises(ValueMismatchError, match="updated its state"):
        trial.testBatch(rows(("a", 1, "")))


def test_the_state_object_is_pysparks_and_converts_as_it_does() -> None:
    def both(value: Any) -> tuple[Any, Any]:
        times = StateTimes("NoTimeout", 5, None)
        mine = KeyState(times, None, timed_out=False)
        theirs = GroupState(
            optionalValue=None, batchProcessingTimeMs=5, eventTimeWatermarkMs=-1,
            timeoutConf="NoTimeout", hasTimedOut=False, watermarkPresent=False, defined=False,
            updated=False, removed=False, timeoutTimestamp=-1, keyAsUnsafe=b"", valueSchema=None,
        )  # type: ignore[arg-type]  # fmt: skip
        found = []
        for state in (mine, theirs):
            state.update(value)
            found.append((state.get, [type(one) for one in state.get], str(state), state.json()))
        return found[0], found[1]

    moment = pd.Timestamp("2026-01-02 03:04:05")
    given = (np.int32(1), np.float32(0.5), np.bool_(True), moment, moment - moment, "a", b"b", [1],
             None, {"x": 1}, np.datetime64(5, "us"))  # fmt: skip
    mine, theirs = both(given)
    assert mine == theirs
    assert both([1, 2])[0] == both([1, 2])[1]
    with pytest.raises(PySparkTypeError, match="CANNOT_BE_NONE"):
        KeyState(StateTimes("NoTimeout", 5, None), None, timed_out=False).update(None)


def test_a_frame_without_rows_is_that_of_pandas_and_new_each_time() -> None:
    make = empty_frames(["a", "b"])
    first = make()
    pd.testing.assert_frame_equal(
        first, pd.DataFrame(columns=["a", "b"]), check_column_type="exact", check_index_type="exact"
    )
    first["c"] = 1
    assert list(make().columns) == ["a", "b"]


def test_the_latest_timeout_there_is_has_a_timer() -> None:
    assert timer_ms(np.array([5, 2**63 - 1])).tolist() == [6, 2**63 - 1]
