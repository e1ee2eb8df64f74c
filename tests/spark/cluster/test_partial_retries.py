"""A stage that is run again in part does not leave state of two evaluations behind it."""

from __future__ import annotations

import json

import pytest

from tests.spark.cluster.trial import FILES, LIMIT_S, Trial

# One to three minutes each: every driver starts executors of its own.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

CHECKSUM = "spark.sql.shuffle.orderIndependentChecksum"


def test_half_of_a_shuffle_that_is_made_again_with_other_rows_is_not_mixed_with_the_other_half(
    local_cluster: Trial,
):
    local_cluster.write_input()
    lost = local_cluster.root / "meeting"
    lost.mkdir()
    conf = {f"{CHECKSUM}.enabled": "false", f"{CHECKSUM}.enableFullRetryOnMismatch": "false"}
    told = {"lost": str(lost), "files": FILES, "sink": "batches", "conf": conf}
    driver = local_cluster.start("a", **told)
    if driver.wait(timeout=LIMIT_S):  # Spark cannot take back what a last stage has given out
        result = json.loads((local_cluster.root / "result-a.json").read_text())
        assert "indeterminate" in result["failed"], local_cluster.log_tail()
        local_cluster.finish(local_cluster.start("b", **told), "b")
    assert (lost / "lost").exists(), "no executor was killed"
    assert local_cluster.committed() == 0
    rows = [
        json.loads(line)
        for path in (local_cluster.root / "in").iterdir()
        for line in path.read_text().splitlines()
    ]
    (path,) = (local_cluster.root / "out").glob("*.json")
    found = json.loads(path.read_text())  # under keys that were drawn: only sums are known
    sums = sum(row["n"] for row in found), sum(row["total"] for row in found)
    assert sums == (len(rows), sum(row["v"] for row in rows))
