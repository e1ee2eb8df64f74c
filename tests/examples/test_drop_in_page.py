"""The page about `install`: its code runs, and what it says of locations is so."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, GroupedData, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

import statebackend
from examples.drop_in.after import balances as after
from examples.drop_in.before import balances as before
from statebackend.errors import CheckpointLocationError
from statebackend.settings import ENABLED, SETTINGS
from tests.spark.local.conformance import PROVIDER
from tests.spark.local.world import setting

TEXT = (Path(__file__).parents[2] / "docs" / "howto" / "drop-in.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
PATCHED = {
    name: getattr(owner, name)
    for owner in (GroupedData, DataStreamWriter)
    for name in re.findall(r"`(\w+)`", TEXT.partition(f"| `{owner.__name__}` |")[2].split(" | ")[0])
}


@pytest.fixture
def session(spark: SparkSession, tmp_path: Path) -> Iterator[SparkSession]:
    """With Spark's own state store, and nothing left of what a test sets."""
    keys = [ENABLED, *(f"spark.statebackend.{one.key}" for one in SETTINGS.values())]
    provider = setting(spark, "spark.sql.streaming.stateStore.providerClass", PROVIDER)
    partitions = setting(spark, "spark.sql.shuffle.partitions", "2")
    with provider, partitions:
        spark.conf.set("spark.statebackend.localDir", str(tmp_path / "local"))
        yield spark
    statebackend.uninstall(spark)
    for key in keys:
        spark.conf.unset(key)


def _write(folder: Path, number: int) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"user": user}) for user in ("ann", "bob", "ann")]
    (folder / f"{number}.json").write_text("\n".join(lines))


def _counts(frame: DataFrame) -> list[tuple[str, int]]:
    return sorted((row.user, row.n) for row in frame.collect())


def test_the_code_of_the_page_runs_from_top_to_bottom(
    session: SparkSession, tmp_path: Path
) -> None:
    names: dict[str, Any] = {"__name__": "__main__", "spark": session, "HOME": str(tmp_path)}
    _write(tmp_path / "clicks", 0)
    assert len(BLOCKS) == 6
    for number, block in enumerate(BLOCKS):
        if number == 4:  # as a context manager, it goes on
            _write(tmp_path / "clicks", 1)
        if number == 5:  # the renamed operator goes on with the state
            _write(tmp_path / "clicks", 2)
            names["start_renamed"]().awaitTermination()
            statebackend.uninstall(session)
        exec(compile(block, "drop-in.md", "exec"), names)
    found = _counts(session.read.parquet(str(tmp_path / "counts")))
    assert found == [("ann", 2), ("ann", 4), ("ann", 6), ("bob", 1), ("bob", 2), ("bob", 3)]
    identity = json.loads((tmp_path / "checkpoint" / "statebackend.json").read_text())
    assert identity["job"] == names["backend"].job
    assert identity["uri"] == "", "it began without a uri"
    assert (tmp_path / "checkpoint" / "_statebackend" / identity["job"]).is_dir()
    statebackend.install(session)
    assert DataStreamWriter.start is PATCHED["start"], "turned off by the last block"


def test_six_methods_are_replaced_while_it_is_installed_and_no_others(
    session: SparkSession,
) -> None:
    def methods() -> dict[str, Any]:
        found = {f"g.{name}": one for name, one in vars(GroupedData).items()}
        return found | {f"w.{name}": one for name, one in vars(DataStreamWriter).items()}

    own = methods()
    with statebackend.install(session):
        changed = {name[2:] for name, one in methods().items() if one is not own.get(name)}
    assert changed == set(PATCHED)
    assert len(PATCHED) == 6
    assert methods() == own


def test_a_location_belongs_to_the_state_that_began_it(
    session: SparkSession, tmp_path: Path
) -> None:
    before.main(session, str(tmp_path / "spark"))
    with pytest.raises(CheckpointLocationError, match="SB1010"):
        after.main(session, str(tmp_path / "spark"))
    statebackend.uninstall(session)
    before.main(session, str(tmp_path / "spark"))

    first = after.main(session, str(tmp_path / "ours"))
    statebackend.uninstall(session)
    with pytest.raises(StreamingQueryException, match="MISSING_STATE_DIRECTORY"):
        before.main(session, str(tmp_path / "ours"))
    assert after.main(session, str(tmp_path / "ours")) != first
