"""`statebackend savepoint edit`, `export` and `import` over the savepoint of a real job."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from statebackend.cli.job_commands import app
from statebackend.cli.savepoint_commands import _options
from statebackend.spark.from_tables.write_savepoint import write_savepoint
from statebackend.tables.given_operators import OperatorState
from statebackend.tables.read_state import read_state

ROWS = pa.table({"user": ["ann", "bob"], "n": pa.array([1, 2], pa.int64())})


def run(*args: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["savepoint", *args])
    assert done.exit_code == status, done.output
    return done.output


@pytest.fixture
def savepoint(tmp_path: Path) -> str:
    to = f"file://{tmp_path}/sp"
    states = {"count": ROWS, "other": ROWS}
    write_savepoint(to, {"counter": OperatorState(key="user string", states=states)})
    return to


def rows_of(savepoint: str, operator: str, state: str) -> list[tuple[str, int]]:
    found = read_state("", savepoint=savepoint, operator=operator, state=state).read_all()
    return sorted(
        (row["key"]["user"], row["value"]["n"])
        for row in found.select(["key", "value"]).to_pylist()
    )


def test_names_change_and_a_state_goes(savepoint: str, tmp_path: Path) -> None:
    to = f"file://{tmp_path}/edited"
    named = ("--rename-operator", "counter=clicks", "--rename-state", "counter:count=total")
    made = run("edit", savepoint, "--to", to, *named, "--drop-state", "counter:other", "--json")
    assert [one["uid"] for one in json.loads(made)["savepoint"]["operators"]] == ["clicks"]
    assert rows_of(to, "clicks", "total") == [("ann", 1), ("bob", 2)]


def test_a_savepoint_of_tables_names_no_job(savepoint: str) -> None:
    shown = run("describe", savepoint).splitlines()
    assert shown[1].strip() == "of tables, or other savepoints"
    folder = savepoint.rpartition("/")[0]
    edit = ("edit", savepoint, "--to", f"{folder}/edited", "--drop-state", "counter:other")
    assert run(*edit)
    assert run("export", savepoint, "--to", f"{folder}/portable")
    assert run("import", f"{folder}/portable", "--to", f"{folder}/back")
    listed = json.loads(run("list", "--in", folder, "--json"))["savepoints"]
    assert [one["job"] for one in listed] == ["", "", ""]


def test_what_is_exported_reads_without_this_package_and_comes_back(
    savepoint: str, tmp_path: Path
) -> None:
    folder, to = tmp_path / "portable", f"file://{tmp_path}/back"
    assert "rows in" in run("export", savepoint, "--to", f"file://{folder}")
    assert json.loads((folder / "manifest.json").read_text())["operators"]
    assert sum(parquet.read_table(path).num_rows for path in folder.rglob("*.parquet")) == 4
    assert "operators counter" in run("import", f"file://{folder}", "--to", to)
    assert rows_of(to, "counter", "count") == rows_of(savepoint, "counter", "count")


@pytest.mark.parametrize("wrong", [("--rename-operator", "counter"), ("--drop-state", "count")])
def test_a_change_of_another_form_is_refused(
    savepoint: str, tmp_path: Path, wrong: tuple[str, str]
) -> None:
    said = run("edit", savepoint, "--to", f"file://{tmp_path}/x", *wrong, status=2)
    assert "is not of the form" in said
    assert not (tmp_path / "x").exists()


def test_the_endpoint_counts_for_whichever_of_the_folders_is_on_s3(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STATEBACKEND_S3_ENDPOINT", "http://127.0.0.1:1")
    for uris in (("file:///to", "s3://b/from"), ("s3://b/to", "file:///from")):
        assert _options("", "", *uris).endpoint_url == "http://127.0.0.1:1"
    assert not _options("", "", "file:///to", "file:///from").endpoint_url


def test_an_import_without_a_name_is_refused_before_spark_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyspark.sql.SparkSession.builder", None)
    args = ["import-spark", str(tmp_path), "--to", f"file://{tmp_path}/to", "--json"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 2, done.output
    assert "Give --uid" in json.loads(done.stdout)["error"]["todo"]
