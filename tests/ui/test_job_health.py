"""The line that says how a job fares, and whether it may be stopped."""

from __future__ import annotations

from typing import Any

import pytest

from statebackend.ui.job_figures import RunFacts, StoredFacts, Waiting
from statebackend.ui.job_health import health_of, waits_for


def running(**facts: Any) -> RunFacts:
    return RunFacts(**{"active": True, "durable_epoch": 41, "durable_s": 3.0, **facts})


def waits(*subtasks: int, of: int = 4) -> list[Waiting]:
    return [Waiting(operator="count", subtasks=list(subtasks), parallelism=of)]


@pytest.mark.parametrize(
    ("facts", "level", "line", "safe"),
    [
        ({}, "good", "Running. Checkpoint 41 was complete 3.0 s ago.", True),
        ({"input": False}, "good", "Running, and there is no input.", True),
        ({"durable_epoch": None}, "good", "No checkpoint is complete yet.", True),
        (
            {"epoch": 42, "running_s": 2.0, "waiting": waits(0, 1)},
            "good",
            "Running: checkpoint 42 for 2.0 s, 2 of 4 subtasks have saved their state.",
            True,
        ),
        (
            {"epoch": 42, "running_s": 30.0, "waiting": waits(3)},
            "slow",
            "Slow: checkpoint 42 has waited 30.0 s for subtask count/3 to save its state. "
            "The other 3 have.",
            True,
        ),
        (
            {"epoch": 42, "running_s": 75.0, "waiting": waits(1, 3)},
            "bad",
            "Stuck: checkpoint 42 has waited 1 min 15 s for subtasks count/1, count/3 to save "
            "their state. The other 2 have.",
            True,
        ),
        (
            {"epoch": 42, "running_s": 75.0, "waiting": waits(0, 1, 2, 3)},
            "bad",
            "for all subtasks to save their state.",
            True,
        ),
        (
            {"store_out_s": 43.0, "epoch": 42, "writing": True},
            "bad",
            "Stuck: the object store has not answered for 43.0 s. Nothing is committed until it "
            "does.",
            False,
        ),
        (
            {"epoch": 42, "writing": True, "writing_s": 20.0},
            "slow",
            "Slow: the record of checkpoint 42 is being written for 20.0 s.",
            False,
        ),
        (
            {"epoch": 42, "writing": True, "asynchronous": True},
            "good",
            "the record of checkpoint 42 is being written.",
            False,
        ),
        ({"failure": "[SB3004] fenced"}, "bad", "Nothing is committed any more: [SB3004]", True),
        ({"behind": "9 rows come"}, "slow", "Lagging: 9 rows come. Checkpoint 41", True),
        (
            {"continuous": True, "interval_s": 10.0, "durable_s": 45.0},
            "slow",
            "Lagging: no checkpoint is complete for 45.0 s, and one is due every 10.0 s.",
            True,
        ),
    ],
)
def test_a_running_job(facts: dict[str, Any], level: str, line: str, safe: bool) -> None:
    found = health_of(running(**facts))
    assert (found.level, found.safe) == (level, safe)
    assert line in found.line


def test_long_batches_are_no_trouble_where_they_are_usual() -> None:
    facts = running(epoch=42, running_s=75.0, waiting=waits(3))
    assert health_of(facts, usual_ms=60_000.0).level == "good"


def test_a_stop_of_a_continuous_job_says_what_is_read_again() -> None:
    found = health_of(running(continuous=True))
    assert "checkpoint 41 (3.0 s ago)" in found.safe_line


def test_many_subtasks_are_counted() -> None:
    found = health_of(running(epoch=1, running_s=99.0, waiting=waits(*range(40), of=100)))
    assert "for 40 subtasks of count" in found.line
    two = [*waits(*range(40), of=100), Waiting(operator="sum", subtasks=[1], parallelism=2)]
    found = health_of(running(epoch=1, running_s=99.0, waiting=two))
    assert "for 41 subtasks (40 of count, 1 of sum)" in found.line


def queued(**facts: Any) -> RunFacts:
    """Of ten subtasks seven have saved, the eighth is at work, and two have not begun."""
    waiting = Waiting(operator="count", subtasks=[7, 8, 9], parallelism=10, not_begun=[8, 9])
    return running(
        **{"epoch": 42, "running_s": 75.0, "waiting": [waiting], "moved_s": 1.0, **facts}
    )


def test_subtasks_that_wait_for_a_core_are_not_stuck_while_others_come_to_an_end() -> None:
    said = "checkpoint 42 for 1 min 15 s. 7 of 10 subtasks have saved their state, 1 is at work, "
    said += "2 have not begun."
    found = health_of(queued())
    assert (found.level, found.line) == ("good", f"Running: {said}")
    found = health_of(queued(), usual_ms=1_000.0)
    assert (found.level, found.line) == ("slow", f"Slow: {said}")


def test_executors_that_are_gone_are_told_from_a_slow_subtask() -> None:
    waiting = Waiting(operator="count", subtasks=[8, 9], parallelism=10, not_begun=[8, 9])
    found = health_of(queued(moved_s=70.0, waiting=[waiting]))
    assert "have saved their state, 2 have not begun." in found.line
    assert "executors are gone" in found.todo


def test_whom_a_checkpoint_waits_for() -> None:
    saved = "7 of 10 subtasks have saved their state; "
    assert waits_for(queued().waiting[0]) == f"{saved}at work: subtask 7; 2 have not begun."
    assert waits_for(waits(7, 8, 9, of=10)[0]) == f"{saved}not yet: subtasks 7, 8, 9."
    assert waits_for(waits(0, 1, of=2)[0]) == "0 of 2 subtasks have saved their state."
    assert waits_for(waits(*range(30), of=40)[0]).endswith(", 18, 19 and 10 more.")


def test_a_subtask_that_keeps_others_from_a_core_is_named() -> None:
    found = health_of(queued(moved_s=70.0))
    assert (found.level, found.line[:7]) == ("bad", "Stuck: ")
    assert "subtask count/7." in found.todo


def test_a_job_that_has_ended() -> None:
    assert health_of(running(active=False)).line.startswith("Stopped after checkpoint 41.")
    failed = health_of(running(active=False, failure="[SB2001] the store is down"))
    assert (failed.level, failed.safe) == ("bad", None)
    assert "[SB2001]" in failed.line


def test_a_job_that_starts_is_neither_stopped_nor_new() -> None:
    for active in (False, True):
        found = health_of(running(active=active, starting=True))
        assert (found.level, found.safe) == ("good", True)
        assert found.line.startswith("Starting: ")
        assert "goes on after checkpoint 41" in found.safe_line
    new = running(epoch=0, durable_s=None, running_s=20.0, waiting=waits(0, 1, 2, 3))
    assert "their state is being read back" in health_of(new).todo
    ended = health_of(running(active=False, durable_epoch=None))
    assert ended.line == "Stopped before any checkpoint. The next start begins anew."


def test_a_stored_job_says_when_it_was_written_last() -> None:
    facts = StoredFacts(durable_epoch=7, written_ms=0, writer="host:1", generation=2)
    assert "Checkpoint 7 is the newest, written 1970-01-01 00:00:00Z by host:1" in (
        health_of(facts).line
    )
