"""Executors come and go under a running query, and subtasks follow."""

from __future__ import annotations

import pytest

from recovery.drill.cluster.live_processes import parent_of
from tests.spark.cluster.trial import Trial, until

# One to three minutes each: every driver starts executors of its own.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


def test_subtasks_spread_over_the_replacement_of_a_lost_executor(local_cluster: Trial) -> None:
    local_cluster.write_input(flag_in_file=4)
    dawdle = local_cluster.root / "dawdle"
    driver = local_cluster.start("a", dawdle=str(dawdle), settings={"rebalance_settle_s": 2.0})
    worker = int(until(lambda: dawdle.exists() and dawdle.read_text(), "a dawdling task"))
    before = set(local_cluster.processes.executors())
    lost = before - {parent_of(parent_of(worker))}
    local_cluster.processes.kill(list(lost))
    until(lambda: len(set(local_cluster.processes.executors()) - lost) == 2, "a replacement")
    log = local_cluster.root / "driver-a.log"
    until(lambda: "subtasks were placed anew (automatic)" in log.read_text(), "a placing")
    dawdle.unlink()
    result = local_cluster.finish(driver, "a")
    local_cluster.check()
    event = result["rebalance"]
    first = {r["executor"] for r in result["restores"][:4]}
    (joined,) = set(event["executors_after"]) - first
    assert event["executors_before"].get(joined, 0) == 0
    assert event["executors_after"][joined] >= 1
    assert event["subtasks_moved"] >= 1
    moved = [r for r in result["restores"] if r["executor"] == joined]
    assert moved
    # One host and one disk: who moves finds its state there, unless the dawdling task still has it.
    held = [r for r in moved if "held by another process" in r["reason"]]
    assert {r["source"] for r in moved if r not in held} <= {"local", "mixed"}
