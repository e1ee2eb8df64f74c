"""Programs of PySpark give the same rows with their state here, and differ in two lines."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import statebackend
from statebackend.cli.run_app import run_app
from statebackend.spark.start.query_identity import IDENTITY_FILE
from tests.spark.local.conformance import PROVIDER
from tests.spark.local.world import setting

FOLDER = Path(__file__).parents[2] / "examples" / "drop_in"
PROGRAMS = sorted(path.stem for path in (FOLDER / "before").glob("[a-z]*.py"))
RUNS = 2


@pytest.fixture
def session(spark: SparkSession, tmp_path: Path) -> Iterator[SparkSession]:
    """The suite's session, as the programs make theirs; nothing is installed in it afterwards."""
    local = setting(spark, "spark.statebackend.localDir", str(tmp_path / "local"))
    provider = setting(spark, "spark.sql.streaming.stateStore.providerClass", PROVIDER)
    partitions = setting(spark, "spark.sql.shuffle.partitions", "2")
    with local, provider, partitions:
        yield spark
    statebackend.uninstall(spark)
    spark.sql("DROP TABLE IF EXISTS ended_sessions")


def test_there_is_a_program_after_for_each_before() -> None:
    assert len(PROGRAMS) == 3
    assert sorted(path.stem for path in (FOLDER / "after").glob("[a-z]*.py")) == PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_lines_are_added_and_none_is_changed(name: str) -> None:
    before, after = ((FOLDER / side / f"{name}.py").read_text() for side in ("before", "after"))
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    changed = [line for line in lines if line[:2] in ("+ ", "- ") and line.strip() != "+"]
    assert changed == ["+ import statebackend", "+     statebackend.install(spark)"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_both_give_the_same_rows_over_restarts_and_so_does_run(
    name: str,
    session: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {}
    for side in ("before", "after"):
        program, folder = import_module(f"examples.drop_in.{side}.{name}"), tmp_path / side
        found[side] = [program.main(session, str(folder)) for _ in range(RUNS)]
        statebackend.uninstall(session)
        session.sql("DROP TABLE IF EXISTS ended_sessions")
        ours = (folder / "checkpoint" / IDENTITY_FILE).exists()
        assert ours == (side == "after"), "which operator ran"
    assert found["after"] == found["before"]
    first, second = found["after"]
    assert first, "the first run finds something"
    assert second != first, "and the second goes on"
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    run_app(FOLDER / "before" / f"{name}.py", [str(tmp_path / "run")])  # statebackend run
    assert capsys.readouterr().out.splitlines() == [str(row) for row in first]
    assert (tmp_path / "run" / "checkpoint" / IDENTITY_FILE).exists()
