"""`statebackend state` over a real job: what it prints, and the files that it writes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import csv, parquet
from typer.testing import CliRunner

from statebackend.cli.job_commands import app
from statebackend.cli.state_commands import _check_flat, _plain
from statebackend.errors import SettingError
from tests.support.golden import EPOCHS, Kept, keys_of, values_of
from tests.support.inprocess import InProcessJob

JOB = "job"


def run(*args: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["state", *args])
    assert done.exit_code == status, done.output
    return done.output if status else done.stdout


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("states")
    job = InProcessJob(folder / "run", name=JOB, time_mode="processing")
    (folder / "run" / "store").mkdir(parents=True)
    (folder / JOB).symlink_to(folder / "run" / "store")
    job.start(Kept())
    for epoch in range(EPOCHS):
        job.run([(key, epoch) for key in keys_of(epoch)])
    return f"file://{folder}"


def test_the_states_are_listed_with_their_schemas(uri: str) -> None:
    shown = run("list", uri, "--job", JOB)
    assert run("list", uri) == shown  # it is the only job
    line = next(line for line in shown.splitlines() if " times_ttl " in line)
    shown_as = "op times_ttl map k bigint word string n int 604800000 ms 1"
    assert line.split() == shown_as.split()
    found = json.loads(run("list", uri, "--job", JOB, "--json"))
    assert {row["state"] for row in found["states"]} >= {"last", "all", "times", "most"}


def test_rows_are_shown_up_to_a_limit(uri: str) -> None:
    place = (uri, "--job", JOB, "--operator", "op", "--state", "last")
    found = json.loads(run("show", *place, "--limit", "3", "--json"))
    assert len(found["rows"]) == 3
    whole = json.loads(run("show", *place, "--columns", "key.k,value.n", "--json"))
    assert {(row["key.k"], row["value.n"]) for row in whole["rows"]} == {
        (k, values_of(k)[-1]) for k in range(10)
    }
    assert "10 rows" in run("show", *place)


def test_timers_are_shown(uri: str) -> None:
    found = json.loads(run("show", uri, "--job", JOB, "--operator", "op", "--timers", "--json"))
    assert sorted(row["key"]["k"] for row in found["rows"]) == list(range(10))


@pytest.mark.parametrize("typed", ["3", "[3]"])
def test_a_key_is_looked_up(uri: str, typed: str) -> None:
    place = (uri, typed, "--job", JOB, "--operator", "op", "--state", "all", "--json")
    rows = json.loads(run("get", *place))["rows"]
    assert [row["value"]["v"] for row in rows] == values_of(3)


def test_a_key_that_is_not_there_is_said_in_words(uri: str) -> None:
    place = (uri, "--job", JOB, "--operator", "op", "--state", "all", "777")
    assert run("get", *place) == "State 'all' of operator 'op' has nothing for this key.\n"
    assert "has nothing for any of these keys." in run("get", *place, "778")
    assert json.loads(run("get", *place, "--json"))["rows"] == []


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        found = parquet.read_table(path).flatten()
    elif path.suffix == ".csv":
        found = csv.read_csv(path)
    elif path.suffix == ".arrow":
        found = pa.ipc.open_file(str(path)).read_all().flatten()
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [{"key.k": row["key"]["k"], "value.n": row["value"]["n"]} for row in rows]
    return list(found.select(["key.k", "value.n"]).to_pylist())


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl", "arrow"])
def test_a_state_is_exported(uri: str, tmp_path: Path, suffix: str) -> None:
    to = tmp_path / f"last.{suffix}"
    place = (uri, "--job", JOB, "--operator", "op", "--state", "last", "--to", str(to))
    assert f"10 rows in {to}" in run("export", *place)
    rows = sorted(read(to), key=lambda row: row["key.k"])
    assert rows == [{"key.k": k, "value.n": values_of(k)[-1]} for k in range(10)]
    assert [path.name for path in tmp_path.iterdir()] == [to.name]
    assert "there already" in run("export", *place, status=2)


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl", "arrow"])
def test_what_is_shown_goes_into_a_file_on_request(uri: str, tmp_path: Path, suffix: str) -> None:
    place = (uri, "--job", JOB, "--operator", "op", "--state", "last")
    some, one = tmp_path / f"some.{suffix}", tmp_path / f"one.{suffix}"
    assert f"3 rows in {some}" in run("show", *place, "--limit", "3", "--to", str(some))
    assert len(read(some)) == 3
    assert f"1 row in {one}" in run("get", *place, "--to", str(one), "4")
    assert read(one) == [{"key.k": 4, "value.n": values_of(4)[-1]}]
    assert "there already" in run("get", *place, "--to", str(one), "4", status=2)


def test_the_list_of_states_goes_into_a_file_on_request(uri: str, tmp_path: Path) -> None:
    to = tmp_path / "states.csv"
    run("list", uri, "--job", JOB, "--to", str(to))
    rows = csv.read_csv(to).to_pylist()
    assert {row["state"] for row in rows} >= {"last", "all", "times", "most"}


def test_what_csv_cannot_hold_is_named_and_json_says_nan_as_spark_does() -> None:
    deep = pa.schema([("value", pa.struct([("tags", pa.list_(pa.string())), ("n", pa.int64())]))])
    with pytest.raises(SettingError, match=r"A CSV file cannot hold value\.tags:"):
        _check_flat(deep)
    assert _plain({"a": [math.nan, -math.inf, 1.5], "b": math.inf}) == {
        "a": ["NaN", "-Infinity", 1.5],
        "b": "Infinity",
    }


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["export", "--state", "last", "--to", "x.xls"], "ends in .parquet"),
        (["show"], "No state was named"),
        (["show", "--state", "last", "--timers"], "Both --state and --timers"),
        (["show", "--state", "nothing"], "no state 'nothing'"),
        (["show", "--state", "last", "--epoch", "99"], "SB7001"),
        (["show", "--state", "last", "--to", "x.xls"], "ends in .parquet"),
    ],
)
def test_what_cannot_be_ends_with_a_sentence(uri: str, args: list[str], said: str) -> None:
    verb, *rest = args
    assert said in run(verb, uri, "--job", JOB, "--operator", "op", *rest, status=2)
