"""The way back: a savepoint is the initial state of each of Spark's own operators."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.cloudpickle import register_pickle_by_value, unregister_pickle_by_value
from pyspark.sql import functions as F

import statebackend
from tests.spark.from_spark import program
from tests.spark.from_spark.conftest import run_to_its_end

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

# Half a minute and more: a query runs with Spark's own state first, which takes seconds a batch.
pytestmark = pytest.mark.timeout(900)


class Back(program.Session):
    """The program's processor, which takes what it had here, timers and all."""

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.n.update((int(initialState.n),))
        self.ids.put([(int(one["id"]), one["at"]) for one in initialState.ids])
        for one in initialState.tags:
            self.tags.updateValue((one["tag"],), (int(one["n"]),))
        for at_ms in initialState.timers:
            self.handle.registerTimer(int(at_ms))


class PandasBack(program.PandasSession):
    """The same with frames."""

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        for row in initialState.itertuples():
            Back.handleInitialState(self, key, row, timerValues)  # type: ignore[arg-type]


class Tally(program.Session):
    """What was a function: its state is a value."""

    def init(self, handle: Any) -> None:
        self.state = handle.getValueState("state", "n bigint, last string")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.state.update((initialState.n, initialState.last))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        ids = sorted(row.id for row in rows)
        if ids:
            n = (self.state.get()[0] if self.state.exists() else 0) + len(ids)
            self.state.update((n, str(ids[-1])))
            yield program._row((key[0], "rows", n, str(ids)))


@pytest.fixture(scope="module", autouse=True)
def travels_by_value(spark: SparkSession, program_by_value: None) -> Iterator[None]:
    register_pickle_by_value(sys.modules[__name__])
    statebackend.register(spark)
    yield
    unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def rest(spark: SparkSession, tmp_path: Path) -> DataFrame:
    """The input that the query has not read: the second file."""
    program.write_input(tmp_path / "in", files=2)
    (tmp_path / "in/000.json").unlink()
    return program.read(spark, tmp_path / "in")


def put_out(frame: DataFrame, location: Path) -> dict[str, list[Any]]:
    """Run Spark's own operator to its end; its rows by what they are."""
    found: dict[str, list[Any]] = {}

    def sink(rows: DataFrame, batch: int) -> None:
        for row in rows.collect():
            found.setdefault(row.what, []).append(list(row))

    run_to_its_end(frame, location, sink)
    return {what: sorted(rows) for what, rows in found.items()}


@pytest.mark.parametrize("kind", ["rows", "pandas"])
def test_a_processors_states_and_timers_go_back(
    spark: SparkSession, of_processor: Path, rest: DataFrame, tmp_path: Path, kind: str
) -> None:
    to = (tmp_path / "savepoint").as_uri()
    statebackend.import_spark(spark, str(of_processor), to, uid="Session")
    saved = spark.read.format("statebackend").option("savepoint", to).option("operator", "Session")
    key = F.col("key.k").alias("k")
    entry = F.struct(F.col("map_key.tag"), F.col("value.n"))
    timers = saved.option("readRegisteredTimers", "true").load()
    timers = timers.groupBy(key).agg(F.collect_list("at_ms").alias("timers"))
    saved = saved.option("readRegisteredTimers", "false")
    counts = saved.option("stateVarName", "n").load().select(key, "value.n")
    lists = saved.option("stateVarName", "ids").load().groupBy(key)
    lists = lists.agg(F.array_sort(F.collect_list(F.struct("index", "value"))).alias("ids"))
    lists = lists.selectExpr("k", "transform(ids, one -> one.value) AS ids")
    tags = saved.option("stateVarName", "tags").load().groupBy(key)
    state = counts.join(lists, "k").join(tags.agg(F.collect_list(entry).alias("tags")), "k")
    given = state.join(timers, "k").groupBy("k")
    rows, how = rest.groupBy("k"), (program.OUTPUT, "Append", "EventTime")
    found = put_out(
        rows.transformWithState(Back(), *how, initialState=given)
        if kind == "rows"
        else rows.transformWithStateInPandas(PandasBack(), *how, initialState=given),
        tmp_path / "spark",
    )
    assert [row[:3] for row in found["rows"]] == [
        [f"k{key}", "rows", 8 if key == 0 else 6] for key in range(3)
    ]
    ids, tagged = json.loads(found["rows"][1][3])
    assert ids == [1, 4, 7, 11, 14, 17], "in their order"
    assert tagged == [["t0", 2], ["t1", 4]]
    due = {row[0]: int(row[3]) - program.START_MS for row in found["timer"]}
    assert due == {"k0": 14_000, "k1": 12_000, "k2": 13_000}, "set before, and fired in Spark"


def test_a_functions_state_goes_back_into_a_processor(
    spark: SparkSession, whole: Path, rest: DataFrame, tmp_path: Path
) -> None:
    to = (tmp_path / "savepoint").as_uri()
    statebackend.import_spark(spark, str(whole), to, uid="tally")
    saved = spark.read.format("statebackend").option("savepoint", to).option("operator", "tally")
    state = saved.option("stateVarName", "state").load().selectExpr("key.k AS k", "value.*")
    how = (program.OUTPUT, "Append", "None")
    rows = rest.groupBy("k")
    made = rows.transformWithState(Tally(), *how, initialState=state.groupBy("k"))
    found = put_out(made, tmp_path / "spark")
    assert [row[2] for row in found["rows"]] == [8, 6, 6]
