"""A program that may not be touched runs with its state kept here."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.full  # starts a Spark of its own

PROGRAM = """
import sys
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

class Counter(StatefulProcessor):
    def init(self, handle):
        self.n = handle.getValueState("n", "n bigint")
    def handleInputRows(self, key, rows, timerValues):
        n = (self.n.get()[0] if self.n.exists() else 0) + sum(1 for _ in rows)
        self.n.update((n,))
        yield Row(k=key[0], n=n)
    def close(self):
        pass

spark = (
    SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    .getOrCreate()
)
root = sys.argv[1]
stream = spark.readStream.schema("k string").json(root + "/in")
made = stream.groupBy("k").transformWithState(Counter(), "k string, n bigint", "Update", "None")
writer = made.writeStream.format("parquet").option("path", root + "/out")
writer = writer.option("checkpointLocation", root + "/at").trigger(availableNow=True)
writer.start().awaitTermination()
print("rows", spark.read.parquet(root + "/out").count())
"""


def test_a_program_is_run_with_its_sessions_installed_in(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_text("".join(f'{{"k":"k{i}"}}\n' for i in range(5)))
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "statebackend.cli", "run"]
    command += ["--uri", (tmp_path / "store").as_uri(), "--local-dir", str(tmp_path / "local")]
    done = subprocess.run(
        [*command, "--parallelism", "1", str(tmp_path / "program.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "rows 5"
    identity = json.loads((tmp_path / "at" / "statebackend.json").read_text())
    assert [path.name for path in (tmp_path / "store").iterdir()] == [identity["job"]]


def test_a_module_of_the_users_that_hides_a_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "snapshot.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", "from statebackend import StateBackend"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: statebackend needs its package 'snapshot'")
    assert str(tmp_path / "snapshot.py") in last
