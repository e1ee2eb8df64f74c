"""The demo's parts without Spark, and the whole of it once."""

from __future__ import annotations

import datetime
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import TimerValues

from examples.flights import batch, check, data
from examples.flights.__main__ import main
from examples.flights.processor import AircraftLog

ROOT = Path(__file__).parents[2]
EPOCHS = 7


class Memory:
    """One kind of state for all keys, in a dict: enough of Spark's interface for the processor."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.kept: dict[Any, Any] = {}


class Value(Memory):
    def get(self) -> Any:
        return self.kept.get(self.handle.key)

    def update(self, value: Any) -> None:
        self.kept[self.handle.key] = value


class List(Memory):
    def get(self) -> Iterator[Any]:
        return iter(self.kept.get(self.handle.key, []))

    def put(self, rows: list[Any]) -> None:
        self.kept[self.handle.key] = rows


class Map(Memory):
    def getValue(self, key: Any) -> Any:
        return self.kept.get(self.handle.key, {}).get(key)

    def updateValue(self, key: Any, value: Any) -> None:
        self.kept.setdefault(self.handle.key, {})[key] = value

    def iterator(self) -> Iterator[Any]:
        return iter(self.kept.get(self.handle.key, {}).items())


class Handle:
    key: Any = None

    def getValueState(self, name: str, schema: str) -> Value:
        return Value(self)

    def getListState(self, name: str, schema: str) -> List:
        return List(self)

    def getMapState(self, name: str, key: str, value: str) -> Map:
        return Map(self)


def _stream(flights: pd.DataFrame, epochs: int, seed: int) -> pa.Table:
    """The sink after all epochs; the rows of an epoch come in any order."""
    handle, processor, rows = Handle(), AircraftLog(), []
    processor.init(handle)  # type: ignore[arg-type]
    for _, part in flights.groupby(data.split(flights, epochs)):
        shuffled = part.sample(frac=1, random_state=seed)
        for key, own in shuffled.groupby("tailnum"):
            handle.key = (key,)
            table = pa.Table.from_pandas(own, schema=data.SCHEMA, preserve_index=False)
            given = iter([Row(**row) for row in table.to_pylist()])
            rows += [
                row.asDict()
                for row in processor.handleInputRows(handle.key, given, TimerValues(-1, -1))
            ]
    return pa.Table.from_pylist(rows, schema=batch.SCHEMA)


@pytest.fixture(scope="module")
def flights() -> pd.DataFrame:
    """A whole year of every fiftieth aircraft."""
    everything, nameless = data.read_flights()
    assert (len(everything), nameless) == (334_264, 2_512)
    chosen = sorted(everything["tailnum"].unique())[::50]
    return everything[everything["tailnum"].isin(chosen)].reset_index(drop=True)


@pytest.fixture(scope="module")
def sink(flights: pd.DataFrame) -> pa.Table:
    return _stream(flights, EPOCHS, seed=1)


def test_the_processor_and_the_batch_computation_agree(
    flights: pd.DataFrame, sink: pa.Table
) -> None:
    compared = check.compare(batch.by_aircraft(flights), sink)
    assert compared.differing == []
    assert compared.ok
    assert compared.equal == flights["tailnum"].nunique()


def test_the_order_within_an_epoch_does_not_matter(flights: pd.DataFrame, sink: pa.Table) -> None:
    order = [("tailnum", "ascending"), ("legs", "ascending")]
    other = _stream(flights, EPOCHS, seed=2)
    assert other.sort_by(order).equals(sink.sort_by(order))


def test_a_day_of_one_aircraft_by_hand() -> None:
    def leg(hour: int, dest: str, dep: int | None, arr: int | None, air: int | None) -> list[Any]:
        scheduled = datetime.datetime(2013, 7, 1, hour)
        return ["N1", hour, dest, scheduled, dep, arr, air]

    legs = [
        leg(6, "BOS", 10, -5, 40),  # lands 06:50, back 07:30 at the earliest
        leg(8, "DCA", 0, 20, 60),  # 30 minutes on the ground: tight
        leg(10, "BOS", None, None, None),  # cancelled
        leg(12, "BOS", 30, 12, 45),  # 150 minutes: not tight
        leg(16, "ORD", 5, None, None),  # diverted
        leg(20, "DCA", 0, 0, 50),  # whatever it did before, it is no turnaround
    ]
    frame = pd.DataFrame(legs, columns=data.SCHEMA.names)
    minutes = ["dep_delay", "arr_delay", "air_time"]
    frame = frame.astype(dict.fromkeys(minutes, "Int32"))
    expected = {
        "tailnum": "N1",
        "legs": 6,
        "flown": 5,
        "cancelled": 1,
        "diverted": 1,
        "last_arrival": datetime.datetime(2013, 7, 1, 20, 50),
        "late_min": 45,
        "recovered_min": 28,
        "tight_turns": 1,
        "last_tight_min": [30],
        "favourite": "BOS",
    }
    assert batch.by_aircraft(frame).to_pylist() == [expected]
    assert check.final_state(_stream(frame, 3, seed=0)) == {"N1": expected}


def test_a_comparison_names_what_differs(flights: pd.DataFrame, sink: pa.Table) -> None:
    rows = batch.by_aircraft(flights).to_pylist()
    rows[0]["late_min"] += 1
    gone, new = rows.pop(1), {**rows[1], "tailnum": "N-NEW"}
    compared = check.compare(pa.Table.from_pylist([*rows, new], schema=batch.SCHEMA), sink)
    assert not compared.ok
    assert [expected["tailnum"] for expected, _ in compared.differing] == [rows[0]["tailnum"]]
    assert compared.missing == ["N-NEW"]
    assert compared.unexpected == [gone["tailnum"]]


def test_an_empty_sink_is_not_equal() -> None:
    assert not check.Comparison().ok


def test_the_history_shows_lost_and_repeated_epochs(flights: pd.DataFrame, sink: pa.Table) -> None:
    files, tailnums = data.split(flights, EPOCHS), flights["tailnum"]

    def history(table: pa.Table, ends: list[int]) -> check.History:
        return check.check_history(files, tailnums, ends, table)

    one_each = list(range(1, EPOCHS + 1))
    assert history(sink, one_each) == check.History(sink.num_rows, 0, 0, 0)
    assert history(sink.slice(1), one_each).lost == 1
    assert history(pa.concat_tables([sink, sink.slice(0, 3)]), one_each).repeated == 3
    assert history(sink, [1, *range(3, EPOCHS + 1)]).unexpected > 0  # two files in one epoch


def test_the_feed_s_files_are_in_the_order_of_their_ages(
    flights: pd.DataFrame, tmp_path: Path
) -> None:
    data.write_feed(flights, tmp_path / "feed", 12)
    files = sorted((tmp_path / "feed").iterdir(), key=lambda path: path.stat().st_mtime)
    assert len(files) == 12
    assert np.diff([path.stat().st_mtime for path in files]).tolist() == [60.0] * 11
    rows = pa.concat_tables([pq.read_table(path) for path in files])
    assert rows.equals(pa.Table.from_pandas(flights, schema=data.SCHEMA, preserve_index=False))
    assert rows["scheduled"].to_pylist() == sorted(rows["scheduled"].to_pylist())


def test_a_directory_with_something_in_it_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("precious")
    assert main(["--dir", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_survives_two_kills_and_equals_the_batch(tmp_path: Path) -> None:
    work = tmp_path / "demo"
    done = subprocess.run(
        [sys.executable, "-m", "examples.flights", "--dir", str(work), "--files", "9"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Run 2 (copies kept) read 0 bytes of state from the durable store." in done.stdout
    assert "4,043 rows equal, 0 differ, 0 missing" in " ".join(done.stdout.split())
    assert not work.exists()
