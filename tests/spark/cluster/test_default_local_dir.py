"""Without a ``local_dir`` copies outlive executors and drivers: they lie beside Spark's folders."""

from __future__ import annotations

import pytest

from statebackend.system import user_folder_name
from tests.spark.cluster.trial import Trial, until

# One to three minutes each: every driver starts executors of its own.
pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(1800)]


def test_the_next_executor_and_the_next_driver_find_the_copies(local_cluster: Trial) -> None:
    disk = local_cluster.root / "spark-disk"
    disk.mkdir()
    given = {"local_dir": "", "conf": {"spark.local.dir": str(disk)}}
    local_cluster.write_input()
    driver = local_cluster.start("a", **given)
    local_cluster.wait_for_batch(2)
    local_cluster.processes.kill(local_cluster.processes.executors()[:1])
    local_cluster.wait_for_batch(4)
    driver.kill()
    driver.wait()
    until(lambda: not local_cluster.processes.executors(), "the executors' end")
    assert (disk / user_folder_name()).is_dir()
    result = local_cluster.finish(local_cluster.start("b", **given), "b")
    local_cluster.check()
    assert {restored["source"] for restored in result["restores"][:4]} == {"local"}
