"""Queries that Spark's own operators began: killed, brought over, and gone on with here."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.cloudpickle import register_pickle_by_value, unregister_pickle_by_value
from pyspark.sql import functions as F
from typer.testing import CliRunner

import statebackend
from statebackend.cli.job_commands import app
from tests.spark.from_spark import program
from tests.spark.from_spark.conftest import state_kept_here
from tests.spark.from_spark.program import CUT, FILES, QUERIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession

    from statebackend.drop_in import Installed

UIDS = {"rows": "Session", "pandas": "PandasSession", "fading": "Fading"}
TIMEOUTS = {"event": "EventTimeTimeout", "processing": "ProcessingTimeTimeout"}
CONF = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.log.level": "ERROR",
}
# Half a minute and more: a query runs with Spark's own state first, which takes seconds a batch.
pytestmark = pytest.mark.timeout(900)

BOUND_S = 400.0  # six queries of a new JVM, beside other tests


@pytest.fixture(scope="module", autouse=True)
def travels_by_value(program_by_value: None) -> Iterator[None]:
    register_pickle_by_value(sys.modules[__name__])
    yield
    unregister_pickle_by_value(sys.modules[__name__])


@dataclass(frozen=True)
class Killed:
    """A place with the checkpoint locations of queries whose driver was killed in a batch."""

    root: Path

    def rows(self, name: str, folder: str = "out") -> dict[int, list[Any]]:
        paths = (self.root / folder / name).glob("[0-9]*")
        return {int(one.name): sorted(json.loads(one.read_text())) for one in paths}

    def checkpoint(self, name: str) -> str:
        return str(self.root / "spark" / name)

    def savepoint(self, name: str) -> str:
        return (self.root / "savepoints" / name).as_uri()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    root = tmp_path_factory.mktemp("moved")
    program.write_input(root / "in")
    with (root / "driver.log").open("wb") as log:
        driver = subprocess.Popen(
            [sys.executable, program.__file__, str(root), json.dumps(CONF)],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    until = time.monotonic() + BOUND_S
    wanted = [root / "out" / name / str(CUT) for name in QUERIES]
    try:
        while not all(one.exists() for one in wanted):
            alive = time.monotonic() < until and driver.poll() is None
            assert alive, (root / "driver.log").read_text()[-5000:]
            time.sleep(0.1)
    finally:
        os.killpg(driver.pid, signal.SIGKILL)  # its JVM and workers, too
        driver.wait()
    return Killed(root)


def uninterrupted(spark: SparkSession, killed: Killed, name: str) -> dict[int, list[Any]]:
    """What Spark's own operator gives out that nobody kills."""
    to = sink(killed, name, "truth")
    query = program.start(spark, name, killed.root, to, at="uninterrupted")
    assert query.awaitTermination(int(BOUND_S))
    return killed.rows(name, "truth")


def brought(spark: SparkSession, killed: Killed, name: str) -> statebackend.SparkImport:
    return statebackend.import_spark(
        spark,
        killed.checkpoint(name),
        killed.savepoint(name),
        uid=UIDS.get(name, "tally"),
        timeout=TIMEOUTS.get(name),
    )


def ours(spark: SparkSession, killed: Killed, name: str) -> Installed:
    """The line before the program, which stays as it is."""
    return state_kept_here(spark, killed.root, killed.savepoint(name))


def sink(killed: Killed, name: str, folder: str = "out") -> Callable[[DataFrame, int], None]:
    place = killed.root / folder / name
    place.mkdir(parents=True, exist_ok=True)
    return lambda frame, batch: program.write(place, frame.collect(), batch)


@pytest.mark.parametrize("name", ["rows", "pandas", "event", "plain"])
def test_a_killed_query_goes_on_as_if_nobody_had_killed_it(
    spark: SparkSession, killed: Killed, name: str
) -> None:
    truth = uninterrupted(spark, killed, name)
    found = brought(spark, killed, name)
    assert (found.epoch, found.unfinished) == (CUT - 1, True)
    assert found.savepoint is not None
    assert found.savepoint.epoch == CUT - 1
    assert max(killed.rows(name)) == CUT, "the cut batch has been put out, and is not committed"
    with ours(spark, killed, name):
        query = program.start(spark, name, killed.root, sink(killed, name), at="ours")
        assert query.awaitTermination(int(BOUND_S))
    assert killed.rows(name) == truth
    assert len(truth) >= FILES


def read_here(killed: Killed, name: str, state: str) -> list[Any]:
    """Rows of a state in the savepoint, without what Spark does not have."""
    uid = UIDS.get(name, "tally")
    reader = statebackend.read_state(
        "", operator=uid, state=state, savepoint=killed.savepoint(name)
    )
    return reader.read_all().drop_columns("key_group").to_pylist()


def read_there(spark: SparkSession, killed: Killed, **options: str) -> DataFrame:
    """What Spark says of the same, as of the newest committed batch."""
    reader = spark.read.format("statestore").options(flattenCollectionTypes="true", **options)
    return reader.load(killed.checkpoint("fading"))


def test_what_waits_for_the_clock_comes_over_with_its_times(
    spark: SparkSession, killed: Killed
) -> None:
    """A TTL, timers and timeouts of processing time: as Spark's own source reads them."""
    for name in ("fading", "processing"):
        (operator,) = brought(spark, killed, name).operators
        assert all(state.rows for state in operator.states), operator
    for state, column in (("n", "value"), ("ids", "list_element"), ("tags", "user_map_value")):
        theirs = read_there(spark, killed, stateVarName=state).select("key", f"{column}.*")
        wanted = sorted((row.key.k, row.ttlExpirationMs) for row in theirs.collect())
        there = read_here(killed, "fading", state)
        assert sorted((row["key"]["k"], row["expires_at_ms"]) for row in there) == wanted
    timers = read_there(spark, killed, readRegisteredTimers="true").collect()
    wanted = sorted((row.key.k, row.expiration_timestamp_ms) for row in timers)
    saved = killed.savepoint("fading")
    found = statebackend.read_timers("", operator="Fading", savepoint=saved).read_all()
    assert sorted((one["key"]["k"], one["at_ms"]) for one in found.to_pylist()) == wanted
    for name in ("fading", "processing"):
        assert sorted(map(_counted, gone_on(spark, killed, name, FILES))) == _rows_of_keys()


def gone_on(spark: SparkSession, killed: Killed, name: str, batches: int) -> list[Any]:
    """The last row of each key, once the program has taken in so many batches here."""
    with ours(spark, killed, name):
        query = program.start(spark, name, killed.root, sink(killed, name), at="ours", stops=False)
        try:
            until = time.monotonic() + BOUND_S
            while max(killed.rows(name)) < batches - 1:
                assert query.exception() is None
                assert time.monotonic() < until
                time.sleep(0.05)
        finally:
            query.stop()
    rows = [row for _, batch in sorted(killed.rows(name).items()) for row in batch]
    return list({row[0]: row for row in rows}.values())


def _counted(row: list[Any]) -> tuple[str, int]:
    return row[0], row[2]


def _rows_of_keys() -> list[tuple[str, int]]:
    every = [i % 3 for _ in range(FILES) for i in range(10)] + [0, 1]
    return [(f"k{key}", every.count(key)) for key in range(3)]


class Back(program.Session):
    """The program's processor, which takes what it had here."""

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.n.update((initialState.n,))
        self.ids.put([(one["id"], one["at"]) for one in initialState.ids])


def test_state_goes_back_to_sparks_own_operator(
    spark: SparkSession, killed: Killed, tmp_path: Path
) -> None:
    """As docs/howto/move-a-spark-job.md has it: an initial state, and the rest of the input."""
    to = (tmp_path / "savepoint").as_uri()
    statebackend.import_spark(spark, killed.checkpoint("rows"), to, uid="Session")
    statebackend.register(spark)
    saved = spark.read.format("statebackend").option("savepoint", to)
    saved = saved.option("operator", "Session")
    counts = saved.option("stateVarName", "n").load().select("key.k", "value.n")
    lists = saved.option("stateVarName", "ids").load().selectExpr("key.k", "index", "value")
    lists = lists.groupBy("k").agg(
        F.expr("array_sort(collect_list(struct(index, value)))").alias("a")
    )
    state = counts.join(lists.selectExpr("k", "transform(a, one -> one.value) ids"), "k")
    for number in range(CUT, FILES):  # what the query has not read
        copied = tmp_path / "rest" / f"{number:03}.json"
        copied.parent.mkdir(exist_ok=True)
        shutil.copy2(killed.root / "in" / copied.name, copied)
    rows = program.read(spark, tmp_path / "rest")
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", program.ROCKS)
    frame = rows.groupBy("k").transformWithState(
        Back(), program.OUTPUT, "Append", "EventTime", initialState=state.groupBy("k")
    )
    writer = frame.writeStream.foreachBatch(sink(killed, "back")).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(tmp_path / "spark")).start()
    spark.conf.unset("spark.sql.streaming.stateStore.providerClass")
    assert query.awaitTermination(int(BOUND_S))
    put_out = [row for _, batch in sorted(killed.rows("back").items()) for row in batch]
    last = {row[0]: row for row in put_out if row[1] == "rows"}
    assert sorted(map(_counted, last.values())) == _rows_of_keys()
    ids = {key: json.loads(row[3])[0] for key, row in last.items()}
    assert {key: len(found) for key, found in ids.items()} == dict(_rows_of_keys())
    assert ids["k2"] == [n for n in range(FILES * 10) if n % 10 % 3 == 2], "in their order"


def test_the_command_line_shows_and_writes(
    spark: SparkSession, killed: Killed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(spark), "stop", lambda self: None)  # every test shares it
    location, to = killed.checkpoint("event"), tmp_path.as_uri()
    said = ["--uid", "tally", "--timeout", "EventTimeTimeout"]
    dry = CliRunner().invoke(app, ["import-spark", location, "--dry-run", "--json", *said])
    assert dry.exit_code == 0, dry.output
    answer = json.loads(dry.stdout)
    asking = CliRunner().invoke(app, ["import-spark", location, "--dry-run"])
    assert asking.exit_code == 0, asking.output
    assert "operator 0: its keys have timeouts, so give their --timeout" in asking.stdout
    assert (answer["epoch"], answer["unfinished"], answer["savepoint"]) == (CUT - 1, True, None)
    made = CliRunner().invoke(app, ["import-spark", location, "--to", to, *said])
    assert made.exit_code == 0, made.output
    assert f"batch {CUT} was planned and not committed" in made.stdout
    assert statebackend.states("", savepoint=to).column("state").to_pylist() == ["state", "timeout"]
    lacking = CliRunner().invoke(app, ["import-spark", location, "--to", to, "--uid", "tally"])
    assert lacking.exit_code == 2
    assert "has timeouts" in lacking.stderr
