"""ProcessorTester: keys, rows and schemas as a processor sees them, and what a tester leaves."""

from __future__ import annotations

import datetime as dt
import gc
import math
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.sql import Row

from statebackend.api.context import ProcessorContext
from statebackend.api.processors import KeyedProcessor
from statebackend.errors import NullKeyError, SettingError, UsageError, ValueMismatchError
from statebackend.testing.processor_tester import ProcessorTester
from tests.api.processors import Reminder, RunningCount, RunningCountInPandas, Totals
from tests.api.tester_inputs import Leaky, amounts, words

# --- keys and rows -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        dt.date(2024, 2, 29),
        dt.datetime(2024, 2, 29, 12, 30, 1, 5),
        dt.timedelta(days=1, microseconds=7),
        Decimal("12.340"),
        -(2**63),
        "ä€𝄞",
        "",
        ("a", 1),
        (1, None, "x"),
    ],
)
def test_a_key_finds_its_state_again(key: Any) -> None:
    schema = "a bigint, b string, c string" if isinstance(key, tuple) and None in key else None
    with ProcessorTester(RunningCount(), keySchema=schema) as tester:
        first = key if isinstance(key, tuple) else (key,)
        assert tester.test(key, words("x")) == [Row(key=first[0], count=1)]
        tester.rescale(3)
        assert tester.test(key, words("x")) == [Row(key=first[0], count=2)]
        assert tester.peekValueState("count", key) == (2,)


def test_timers_know_a_key_of_several_columns() -> None:
    with ProcessorTester(Reminder(), timeMode="ProcessingTime") as tester:
        tester.test(("a", 1), [Row(at=5)])
        assert tester.setProcessingTime(6) == [("a", 1, 5, 6, -1, 1)]


def test_a_numpy_key_is_the_same_as_a_plain_one() -> None:
    with ProcessorTester(RunningCount()) as tester:
        tester.test(np.int64(7), words("x"))
        assert tester.peekValueState("count", 7) == (1,)


def test_keys_must_be_of_one_type() -> None:
    with ProcessorTester(RunningCount()) as tester:
        tester.test(1, words("x"))
        with pytest.raises(ValueMismatchError):
            tester.test("one", words("x"))
        with pytest.raises(NullKeyError):
            tester.test(None, words("x"))


def test_a_key_of_unknown_type_asks_for_a_schema() -> None:
    with (
        ProcessorTester(RunningCount()) as tester,
        pytest.raises(UsageError, match="keySchema") as caught,
    ):
        tester.test((1, None), words("x"))
    assert "None" in str(caught.value)


def test_rows_reach_the_processor_as_they_are() -> None:
    seen: list[Any] = []

    class Looking(Leaky):
        def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> None:
            seen.extend(rows)

    given = [Row(odd=object()), {"no": "row"}]
    tester = ProcessorTester(Leaky())
    tester._operator.processors[0] = Looking()  # a closure would be pickled with its list
    tester.test("a", given)  # type: ignore[arg-type]
    tester.close()
    assert seen == given
    assert seen[0] is given[0]


def test_output_is_checked_and_converted_with_a_schema() -> None:
    with ProcessorTester(Totals(), outputSchema="k string, top bigint, mean double") as tester:
        (row,) = tester.test("a", amounts(4))
        assert row == Row(k="a", top=4, mean=4.0)
        assert row.top == 4
    with (
        ProcessorTester(Totals(), outputSchema="k string, top bigint") as tester,
        pytest.raises(ValueMismatchError, match="2 fields"),
    ):
        tester.test("a", amounts(4))


def test_output_that_does_not_fit_undoes_the_batch() -> None:
    with ProcessorTester(Totals(), outputSchema="k bigint, top bigint, mean double") as tester:
        with pytest.raises(ValueMismatchError, match="'k'"):
            tester.test("a", amounts(4))
        assert tester.peekListState("all", "a") == []


def test_frames_are_checked_with_a_schema_too() -> None:
    frame = pd.DataFrame({"word": ["x"]})
    with ProcessorTester(RunningCountInPandas(), outputSchema="count bigint, key string") as tester:
        found = tester.testInPandas("a", frame)
        assert found.columns.tolist() == ["count", "key"]
        assert found["count"].tolist() == [1]
    with (
        ProcessorTester(RunningCountInPandas(), outputSchema="count bigint, k string") as tester,
        pytest.raises(ValueMismatchError),
    ):
        tester.testInPandas("a", frame)


def test_an_output_mode_that_is_none_of_sparks_is_refused_with_those_that_are() -> None:
    with pytest.raises(SettingError, match="outputMode='Foo'") as caught:
        ProcessorTester(RunningCount(), outputMode="Foo")
    assert "outputMode append, update or complete" in caught.value.todo


def test_output_that_is_no_row_is_refused_without_a_schema() -> None:
    class Careless(Leaky):
        def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> Any:
            return [1, 2]

    with ProcessorTester(Careless()) as tester, pytest.raises(ValueMismatchError, match="no row"):
        tester.test("a", words("x"))


def test_a_value_that_does_not_fit_its_schema_is_refused() -> None:
    with ProcessorTester(RunningCount()) as tester, pytest.raises(ValueMismatchError):
        tester.updateValueState("count", "a", ("one",))


def test_counters_and_spies_of_a_test_see_every_call() -> None:
    rows_seen, opened = [], 0
    extra = 0

    def scaled(n: int) -> int:
        return n + extra

    class Spied(KeyedProcessor):
        def __init__(self) -> None:
            self.scale = lambda n: scaled(n)
            self.kept: list[int] = []
            self.module = math

        def open(self, ctx: Any) -> None:
            nonlocal opened
            opened += 1

        def process(self, key: Any, rows: Any, ctx: Any) -> Any:
            self.kept.append(1)
            for row in rows:
                rows_seen.append(row.n)
                yield (self.scale(row.n), len(self.kept))

    before = dict(vars(Spied))
    with ProcessorTester(Spied()) as tester:
        assert tester.test("a", [Row(n=1)]) == [(1, 1)]
        tester.restart()
        assert isinstance(tester.processor, Spied)
        extra = 100
        assert tester.test("a", [Row(n=2)]) == [(102, 1)], "a new object, the same code"
        tester.rescale(2)
        opened_before = opened
        tester.test("a", [Row(n=3)])
        assert opened == opened_before + 1
    assert rows_seen == [1, 2, 3]
    assert {k: v for k, v in vars(Spied).items() if k != "__slotnames__"} == before


# --- what it leaves ------------------------------------------------------------------------------


def test_the_directory_goes_with_the_tester() -> None:
    folders = []
    with ProcessorTester(RunningCount()) as tester:
        folders.append(Path(tester._operator.stores[0].path).parent)
        assert folders[0].is_dir()
    other = ProcessorTester(RunningCount())
    folders.append(Path(other._operator.stores[0].path).parent)
    del other
    gc.collect()
    assert not any(folder.exists() for folder in folders)


def test_a_closed_tester_is_refused() -> None:
    tester = ProcessorTester(RunningCount())
    tester.close()
    tester.close()
    with pytest.raises(UsageError, match="closed"):
        tester.test("a", words("x"))


_ALONE = """
import sys
from pyspark import SparkContext
from pyspark.sql import Row
from statebackend.testing.processor_tester import ProcessorTester
from tests.api.processors import Words
with ProcessorTester(Words(), keySchema="key string") as tester:
    assert tester.test("a", [Row(word="x")]) == [Row(words=["x"])]
assert SparkContext._gateway is None
assert SparkContext._active_spark_context is None
assert not any(name.startswith("statebackend.spark") for name in sys.modules)
"""


def test_no_jvm_is_started_and_none_is_needed() -> None:
    root = Path(__file__).parents[2]
    nowhere = {"JAVA_HOME": "/nowhere", "SPARK_HOME": "/nowhere", "PATH": "/nowhere"}
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", _ALONE],
        cwd=root,
        env={**nowhere, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
