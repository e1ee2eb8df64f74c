"""Processes are killed while the durable copies go to a real S3 server, asynchronously too."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from recovery.drill.proxy.fault_plan import Calm, Fault, Rule, Script
from recovery.drill.proxy.fault_proxy import FaultProxy
from recovery.drill.proxy.s3_requests import Verb
from tests.spark.cluster.trial import Trial, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.s3 import S3

# One to three minutes each: every driver starts executors of its own.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

LARGE = {
    "inline_limit_bytes": 0,
    "base_every_epochs": 2,
    "base_apart_every_epochs": 2,
    "base_apart_min_bytes": 0,
    "base_apart_ratio": 0.0,
    "base_whole_limit_bytes": 0,
    "clean_every_epochs": 2,
    "clean_min_age_s": 0.0,
}


@pytest.fixture
def proxy(ministack: S3) -> Iterator[FaultProxy]:
    with FaultProxy(ministack.plain_url.removeprefix("http://")) as running:
        yield running


def told(proxy: FaultProxy, uri: str, **settings: object) -> dict:
    given = {"s3_endpoint": proxy.url, "s3_region": "us-east-1", **settings}
    return {"uri": uri, "sink": "batches", "settings": given}


@pytest.mark.parametrize(
    "late",
    [
        pytest.param("never", marks=pytest.mark.slow),
        pytest.param("before the restart", marks=pytest.mark.slow),
        "after the takeover",
    ],
)
def test_a_driver_killed_one_epoch_ahead_of_its_log_goes_back_by_exactly_that(
    local_cluster: Trial, proxy: FaultProxy, ministack: S3, late: str
) -> None:
    given = {**told(proxy, ministack.fresh_uri()), "commit": "async"}
    local_cluster.write_input()
    # The sixth conditional write under log/: the claim was the first, so epoch 4's record.
    held = Rule(fault=Fault.hold(), verbs={Verb.PUT_IF}, group="log/", nth={6})
    proxy.plan = Script(held)
    driver = local_cluster.start("a", **given)
    local_cluster.wait_for_batch(4)  # Spark has committed it, and its record is not there
    assert proxy.wait_held(timeout_s=60)
    driver.kill()
    driver.wait()
    until(lambda: not local_cluster.processes.executors(), "the executors' end")
    proxy.plan = Calm()
    if late == "before the restart":
        proxy.release()
    second = local_cluster.start("b", **given)
    if late == "after the takeover":
        local_cluster.wait_for_batch(6)
        proxy.release()
    local_cluster.finish(second, "b")
    local_cluster.check(recut=late != "before the restart")
    log = (local_cluster.root / "driver-b.log").read_text(errors="replace")
    assert ("went back: " in log) == (late != "before the restart")


def test_a_lost_host_with_large_state_comes_back_from_uploaded_files(
    local_cluster: Trial, proxy: FaultProxy, ministack: S3
) -> None:
    given = told(proxy, ministack.fresh_uri(), **LARGE)
    local_cluster.write_input()
    driver = local_cluster.start("a", **given)
    local_cluster.wait_for_batch(3)
    local_cluster.processes.kill(local_cluster.processes.executors()[:1])
    local_cluster.wait_for_batch(6)
    driver.kill()
    driver.wait()
    until(lambda: not local_cluster.processes.executors(), "the executors' end")
    shutil.rmtree(local_cluster.root / "local")
    result = local_cluster.finish(local_cluster.start("b", **given), "b")
    local_cluster.check()
    assert {r["source"] for r in result["restores"][:4]} == {"durable"}
