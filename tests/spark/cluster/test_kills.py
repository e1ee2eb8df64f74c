"""Processes of a real cluster are killed; the results are those of an undisturbed run."""

from __future__ import annotations

import shutil

import pytest

from recovery.drill.cluster.local_cluster import LOCAL_DIR
from tests.spark.cluster.trial import FILES, Trial, until

# One to three minutes each: every driver starts executors of its own.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


def sources(result: dict, epoch: int | None = None) -> set[str]:
    """Where subtasks got their state from."""
    return {r["source"] for r in result["restores"] if epoch is None or r["epoch"] == epoch}


# Over a minute: it starts two drivers, each with executors, and one executor anew.
@pytest.mark.promise
def test_a_killed_worker_executor_and_driver_lose_nothing_and_local_copies_suffice(
    local_cluster: Trial,
):
    local_cluster.write_input(files=6)
    driver = local_cluster.start("a")
    local_cluster.wait_for_batch(0)
    local_cluster.processes.kill(until(local_cluster.processes.python_workers, "a Python worker"))
    local_cluster.wait_for_batch(1)
    local_cluster.processes.kill(local_cluster.processes.executors()[:1])
    local_cluster.wait_for_batch(3)
    driver.kill()
    driver.wait()
    until(lambda: not local_cluster.processes.executors(), "the executors' end")
    result = local_cluster.finish(local_cluster.start("b"), "b")
    local_cluster.check()
    first = result["restores"][:4]
    assert {r["source"] for r in first} == {"local"}
    assert sum(r["durable_bytes"] + r["durable_reads"] for r in first) == 0


def test_a_killed_driver_comes_back_from_the_store_when_the_local_copies_are_gone(
    local_cluster: Trial,
):
    local_cluster.write_input()
    driver = local_cluster.start("a")
    local_cluster.wait_for_batch(3)
    driver.kill()
    driver.wait()
    until(lambda: not local_cluster.processes.executors(), "the executors' end")
    shutil.rmtree(local_cluster.root / "local")
    result = local_cluster.finish(local_cluster.start("b"), "b")
    local_cluster.check()
    assert {r["source"] for r in result["restores"][:4]} == {"durable"}


def test_a_frozen_worker_that_thaws_after_its_successor_took_over_harms_nobody(two_hosts: Trial):
    # Frozen with its executor and its Spark worker, so that nobody ends it; one disk for both
    # "hosts", so that the successor finds the store that the frozen process holds.
    two_hosts.write_input(flag_in_file=4)
    dawdle = two_hosts.root / "dawdle"
    conf = {
        "spark.network.timeout": "30s",
        "spark.network.timeoutInterval": "1s",
        "spark.executor.heartbeatInterval": "2s",
    }
    driver = two_hosts.start(
        "a",
        dawdle=str(dawdle),
        conf=conf,
        settings={"lease_timeout_s": 1.0},
        local_dir=str(two_hosts.root / "local"),
    )
    worker = int(until(lambda: dawdle.exists() and dawdle.read_text(), "a dawdling task"))
    of_hosts = [two_hosts.processes.of_host(host.name) for host in two_hosts.cluster.hosts]
    (frozen,) = [pids for pids in of_hosts if worker in pids]
    two_hosts.processes.freeze(frozen)
    two_hosts.wait_for_batch(5)
    dawdle.unlink()
    two_hosts.processes.thaw(frozen)
    result = two_hosts.finish(driver, "a")
    two_hosts.check()
    held = [r for r in result["restores"] if "held by another process" in r["reason"]]
    # The subtask that dawdled first, then those whose stores the frozen worker had kept open.
    assert held[0]["epoch"] == 3
    assert {r["source"] for r in held} == {"durable"}


def test_a_speculative_twin_is_not_waited_for_and_changes_nothing(two_hosts: Trial):
    two_hosts.write_input(flag_in_file=4)
    dawdle = two_hosts.root / "dawdle"
    conf = {
        "spark.speculation": "true",
        "spark.speculation.multiplier": "1.5",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.interval": "200ms",
    }
    driver = two_hosts.start("a", dawdle=str(dawdle), conf=conf, settings={"lease_timeout_s": 1.0})
    until(dawdle.exists, "a dawdling task")
    two_hosts.wait_for_batch(4)  # the twin finished it, on the other host
    assert dawdle.exists()
    dawdle.unlink()
    two_hosts.finish(driver, "a")
    two_hosts.check()


def test_subtasks_stay_on_their_host_and_move_when_it_is_lost(two_hosts: Trial):
    two_hosts.write_input()
    driver = two_hosts.start("a", local_dir=LOCAL_DIR)
    two_hosts.wait_for_batch(3)
    lost = two_hosts.cluster.hosts[0]
    two_hosts.processes.kill(two_hosts.processes.executors(lost.name))
    shutil.rmtree(lost.local_dir, ignore_errors=True)
    result = two_hosts.finish(driver, "a")
    two_hosts.check()
    starts, moves = result["restores"][:4], result["restores"][4:]
    assert {r["source"] for r in starts} == {"empty"}
    hosts = {r["subtask"]: r["host"] for r in starts}
    assert set(hosts.values()) == {"127.0.0.2", "127.0.0.3"}
    # Only what was on the lost host moved (a restore elsewhere would be a subtask that hopped).
    assert moves
    assert {r["source"] for r in moves} <= {"durable", "mixed"}
    assert two_hosts.committed() == FILES - 1


def test_two_drivers_on_one_job_leave_one_and_exact_results(local_cluster: Trial):
    local_cluster.write_input(flag_in_file=4)
    dawdle = local_cluster.root / "dawdle"
    first = local_cluster.start("a", dawdle=str(dawdle))
    until(dawdle.exists, "a dawdling task")
    second = local_cluster.start("b", settings={"lease_timeout_s": 1.0})
    local_cluster.wait_for_batch(5)
    dawdle.unlink()
    result = local_cluster.finish(second, "b")
    lost = local_cluster.finish(first, "a", ok=False)
    local_cluster.check()
    assert result["failed"] == ""
    assert lost["failed"]
