"""Kills in a job with event time: a timer fires once, an initial state counts once."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests.spark.cluster.trial import FILES, Trial, until

# One to three minutes each: every driver starts executors of its own.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]


def _kill_driver(cluster: Trial, driver: Any) -> None:
    driver.kill()
    driver.wait()
    until(lambda: not cluster.processes.executors(), "the executors' end")


@pytest.mark.slow
def test_a_driver_killed_in_the_first_epoch_and_an_executor_later_change_no_result(
    local_cluster: Trial,
):
    told = local_cluster.write_timed_input(flag_in_file=0)
    dawdle = local_cluster.root / "dawdle"
    driver = local_cluster.start("a", dawdle=str(dawdle), **told)
    until(dawdle.exists, "a task in the first epoch")
    _kill_driver(local_cluster, driver)
    assert local_cluster.committed() == -1
    driver = local_cluster.start("b", **told)
    local_cluster.wait_for_batch(3)
    local_cluster.processes.kill(local_cluster.processes.executors()[:1])
    local_cluster.finish(driver, "b")
    local_cluster.check_timed()


def test_a_driver_killed_in_mid_run_goes_on_from_the_store_with_its_timers(local_cluster: Trial):
    told = local_cluster.write_timed_input()
    driver = local_cluster.start("a", **told)
    local_cluster.wait_for_batch(4)
    _kill_driver(local_cluster, driver)
    shutil.rmtree(local_cluster.root / "local")
    result = local_cluster.finish(local_cluster.start("b", **told), "b")
    local_cluster.check_timed()
    assert {r["source"] for r in result["restores"][:4]} == {"durable"}


def test_a_driver_killed_while_the_last_timers_fire_fires_them_once(local_cluster: Trial):
    told = local_cluster.write_timed_input()
    dawdle = local_cluster.root / "dawdle"
    told |= {"dawdle": str(dawdle), "dawdle_at_ms": local_cluster.last_timer_ms()}
    driver = local_cluster.start("a", **told)
    until(dawdle.exists, "a task in the last timer")
    assert local_cluster.committed() == FILES - 1, "the batch without data is running"
    _kill_driver(local_cluster, driver)
    local_cluster.finish(local_cluster.start("b", **told), "b")
    local_cluster.check_timed()


@pytest.mark.slow
def test_asynchronous_commits_lose_no_timer_of_a_killed_driver(local_cluster: Trial):
    told = local_cluster.write_timed_input() | {"commit": "async", "sink": "batches"}
    driver = local_cluster.start("a", **told)
    local_cluster.wait_for_batch(4)
    _kill_driver(local_cluster, driver)
    local_cluster.finish(local_cluster.start("b", **told), "b")
    local_cluster.check_timed(recut=True)
