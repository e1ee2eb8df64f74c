"""Who listens to a job's progress."""

from __future__ import annotations

import json
import logging

import pytest
from pyspark.logger.logger import JSONFormatter

from snapshot.log.progress_book import ProgressBook
from snapshot.log.progress_events import ProgressEvent, RebalanceProgress

EVENT = RebalanceProgress(
    job="j",
    epoch=7,
    reason="by hand",
    joined=["2"],
    left=[],
    executors_before={"1": 4},
    executors_after={"1": 2, "2": 2},
    subtasks_moved=2,
    seconds=1.5,
)


def test_a_listener_is_given_every_event_until_it_ends() -> None:
    book, heard = ProgressBook("j"), list[ProgressEvent]()
    end = book.listen(heard.append)
    book.rebalanced(EVENT)
    end()
    book.rebalanced(EVENT)
    assert heard == [EVENT]


def test_a_listener_that_fails_is_logged_and_holds_up_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    book, heard = ProgressBook("j"), list[ProgressEvent]()

    def fails(event: ProgressEvent) -> None:
        raise ValueError("no room")

    book.listen(fails)
    book.listen(heard.append)
    book.rebalanced(EVENT)
    assert heard == [EVENT]
    assert book.summary(None).last_rebalance == EVENT
    assert "a listener to the progress of job j failed" in caplog.text


def test_an_event_has_what_sparks_own_log_format_shows_beside_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "statebackend.progress")
    ProgressBook("j").rebalanced(EVENT)
    shown = json.loads(JSONFormatter().format(caplog.records[-1]))
    assert shown["logger"] == "statebackend.progress"
    assert shown["context"] == {"job": "j", "epoch": "7"}
    assert json.loads(shown["msg"])["subtasks_moved"] == 2
