"""Queries with several operators: brought over in the midst of a batch, and gone on with here."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.cloudpickle import register_pickle_by_value, unregister_pickle_by_value
from pyspark.errors import StreamingQueryException
from pyspark.sql import Row

import statebackend
from tests.spark.from_spark import program
from tests.spark.from_spark.conftest import run_to_its_end, state_kept_here
from tests.spark.from_spark.program import CUT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

# Half a minute and more: a query runs with Spark's own state first, which takes seconds a batch.
pytestmark = pytest.mark.timeout(900)

FILES = 4
STAMPED = f"{program.OUTPUT}, at timestamp"


class Stamped(program.Session):
    """Gives event time out, too."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        found = sorted((row.id, row.ts) for row in rows)
        if found:
            row = self.taken(key, found, program._ms(found) + 5000)
            yield Row(**program._row(row).asDict(), at=found[-1][1])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        at = datetime.fromtimestamp(timerValues.getCurrentWatermarkInMs() / 1000 + 1)
        row = (key[0], "timer", self.n.get()[0], str(expiredTimerInfo.getExpiryTimeInMs()))
        yield Row(**program._row(row).asDict(), at=at)


class Behind(program.Session):
    """Counts what comes out of another operator."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        found = sorted((row.n, row.at) for row in rows)
        if found:
            yield program._row(self.taken(key, found, int(found[-1][1].timestamp() * 1000) + 3000))


def united(rows: DataFrame) -> DataFrame:
    """Two operators with timers side by side, over one source that is read in two places."""
    sessions = rows.where("k != 'k1'").groupBy("k")
    made = sessions.transformWithState(program.Session(), program.OUTPUT, "Append", "EventTime")
    function = (program.tally, program.OUTPUT, "n bigint, last string", "append")
    counted = rows.where("k != 'k2'").groupBy("k")
    more = counted.applyInPandasWithState(*function, "EventTimeTimeout")
    return made.union(more)


def stacked(rows: DataFrame) -> DataFrame:
    """One operator above another, both with timers."""
    first = rows.groupBy("k").transformWithState(
        Stamped(), STAMPED, "Append", "EventTime", eventTimeColumnName="at"
    )
    mode = "Append", "EventTime"
    return first.groupBy("what").transformWithState(Behind(), program.OUTPUT, *mode)


QUERIES: dict[str, tuple[Callable[[DataFrame], DataFrame], dict[int, str], dict[int, str]]] = {
    "united": (united, {0: "Session", 1: "tally"}, {1: "EventTimeTimeout"}),
    "stacked": (stacked, {0: "Behind", 1: "Stamped"}, {}),
}


@pytest.fixture(scope="module", autouse=True)
def travels_by_value(program_by_value: None) -> Iterator[None]:
    register_pickle_by_value(sys.modules[__name__])
    yield
    unregister_pickle_by_value(sys.modules[__name__])


def run(spark: SparkSession, name: str, root: Path, at: str, out: str, *, cut: bool = False) -> Any:
    """Run a query to its end, or have its sink fail once it has a batch: what the sink has."""
    place = root / out
    place.mkdir(exist_ok=True)

    def sink(frame: DataFrame, batch: int) -> None:
        program.write(place, frame.collect(), batch)
        if cut and batch == CUT:
            raise ValueError("cut here")

    frame = QUERIES[name][0](program.read(spark, root / "in"))
    if cut:
        with pytest.raises(StreamingQueryException, match="cut here"):
            run_to_its_end(frame, root / at, sink)
    else:
        run_to_its_end(frame, root / at, sink)
    found = {int(one.name): json.loads(one.read_text()) for one in place.glob("[0-9]*")}
    return {batch: sorted(rows) for batch, rows in found.items()}


@pytest.mark.parametrize("name", QUERIES)
def test_several_operators_go_on_as_if_nothing_had_happened(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    _, uids, timeouts = QUERIES[name]
    program.write_input(tmp_path / "in", FILES)
    truth = run(spark, name, tmp_path, "uninterrupted", "truth")
    run(spark, name, tmp_path, "spark", "out", cut=True)
    to = (tmp_path / "savepoint").as_uri()
    location = str(tmp_path / "spark")
    found = statebackend.import_spark(spark, location, to, uid=uids, timeout=timeouts)
    assert (found.epoch, found.unfinished, found.problems) == (CUT - 1, True, [])
    assert all(state.rows for one in found.operators for state in one.states)
    with state_kept_here(spark, tmp_path, to):
        assert run(spark, name, tmp_path, "ours", "out") == truth
    assert len(truth) >= FILES
