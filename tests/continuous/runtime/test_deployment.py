"""Errors before a job runs: they reach its driver, and no restart is tried that cannot help."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from recovery.decide.restart_strategy import FixedDelay, NoRestart
from statebackend.continuous.driver.run_loop import _stage_error
from statebackend.continuous.driver.slot_stage import Stage
from statebackend.continuous.sinks.collect_sink import CollectSink
from statebackend.continuous.worker import slot as slot_module
from statebackend.errors import (
    PeerLostError,
    ProcessorError,
    SettingError,
    SparkLostError,
)
from tests.continuous.runtime.jobs import OUTPUT, Counting, Numbers, check_counts, truth

if TYPE_CHECKING:
    from statebackend.continuous.worker.slot import Run
    from statebackend.rpc.session_endpoint import Credentials
    from tests.continuous.runtime.world import World


def count(world: World, rows: int = 1000) -> CollectSink:
    sink = CollectSink()
    keyed = world.source(Numbers(rows)).key_by("key")
    keyed.process(Counting(), uid="count", output_schema=OUTPUT).sink(sink)
    return sink


class Failing:
    """Raises instead of making what it stands for, the first so many times."""

    def __init__(self, real: Any, error: BaseException, times: int) -> None:
        self.real, self.error, self.left = real, error, times
        self.lock = threading.Lock()

    def __call__(self, *given: Any, **named: Any) -> Any:
        with self.lock:
            self.left -= 1
            fails = self.left >= 0
        if fails:
            raise self.error
        return self.real(*given, **named)


def fails(
    monkeypatch: pytest.MonkeyPatch, what: str, error: BaseException, times: int = 1000
) -> None:
    real = getattr(slot_module, what)
    monkeypatch.setattr(slot_module, what, Failing(real, error, times))


@pytest.mark.parametrize("channel_bytes", [0, 4096, 8191])
def test_a_channel_too_small_for_rows_is_refused_at_the_start(
    world: World, channel_bytes: int
) -> None:
    count(world)
    with pytest.raises(SettingError, match=f"channel_bytes is {channel_bytes}.*8192 or more"):
        world.start(1, channel_bytes=channel_bytes)


def test_the_smallest_channel_is_large_enough(world: World) -> None:
    sink = count(world)
    assert world.start(2, channel_bytes=8192).await_termination(60.0)
    check_counts(sink.rows(), truth(1000))


def test_a_setting_that_a_slot_refuses_reaches_the_driver_and_ends_the_job_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    count(world)
    fails(monkeypatch, "Inbox", SettingError("The inbox is round.", todo="Give a square one."))
    query = world.start(2, restart=FixedDelay(12, 0.0))
    with pytest.raises(SettingError, match=r"\[SB1001\] The inbox is round. Give a square one."):
        query.await_termination(60.0)
    assert query.restarts == 0


@pytest.mark.parametrize("what", ["Inbox", "ExchangeServer", "copies_seen", "SubtaskState"])
def test_whatever_fails_while_a_slot_is_deployed_reaches_the_driver(
    world: World, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    count(world)
    fails(monkeypatch, what, KeyError("nobody thought of it"))
    query = world.start(2, restart=NoRestart())
    said = r"\[SB1014\] Slot [01] failed: KeyError: 'nobody thought of it'"
    with pytest.raises(ProcessorError, match=said):
        query.await_termination(60.0)


def test_what_may_pass_is_left_to_the_restart_strategy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = count(world)
    fails(monkeypatch, "ExchangeServer", OSError("no port is free"), times=1)
    query = world.start(2, restart=FixedDelay(2, 0.0))
    assert query.await_termination(60.0)
    assert query.restarts == 1
    check_counts(sink.rows(), truth(1000))


def test_a_job_whose_spark_is_gone_is_not_started_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stage(run: Run, credentials: Credentials) -> Stage:
        def gone() -> None:
            raise SparkLostError("Spark is gone.")

        return Stage(gone, lambda: None)

    count(world)
    monkeypatch.setattr(world.cluster, "stage", stage)
    query = world.start(2, restart=FixedDelay(12, 0.0))
    with pytest.raises(SparkLostError):
        query.await_termination(60.0)
    assert query.restarts == 0


def test_a_stage_that_never_reached_a_slot_says_what_python_said() -> None:
    said = _stage_error(
        RuntimeError(
            "An error occurred while calling o1.collect.\n"
            ": org.apache.spark.SparkException: Job aborted due to stage failure\n"
            "Traceback (most recent call last):\n"
            '  File "worker.py", line 1, in main\n'
            "    process()\n"
            "ModuleNotFoundError: No module named 'statebackend'\n"
            "\tat org.apache.spark.api.python.BasePythonRunner\n"
        )
    )
    assert isinstance(said, PeerLostError)
    assert "ModuleNotFoundError: No module named 'statebackend'" in said.what
