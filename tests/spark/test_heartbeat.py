"""When the heartbeat asks for a batch: the decision by itself, without Spark."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from statebackend.errors import UnsupportedQueryError
from statebackend.spark.frames.heartbeat import HeartbeatFile, check_trigger, wanted_epoch

NEVER: dict[str, int] = {}


def said(epoch: int, *, event: bool = False, at_ms: int | None = None) -> bytes:
    text = {"epoch": epoch, "watermark_moves": event, "processing_due_ms": at_ms}
    return json.dumps({"run": text}).encode()


def test_nothing_is_asked_for_before_anything_was_said() -> None:
    assert wanted_epoch(b"", 3, NEVER, 0) == (3, NEVER)
    assert wanted_epoch(b"{", 3, NEVER, 0) == (3, NEVER)


def test_nothing_is_asked_for_when_nothing_is_due() -> None:
    assert wanted_epoch(said(4), 3, NEVER, 10) == (3, NEVER)
    assert wanted_epoch(said(4, at_ms=11), 3, NEVER, 10) == (3, NEVER)


def test_the_next_epoch_is_asked_for_when_a_timer_is_due() -> None:
    assert wanted_epoch(said(4, event=True), 3, NEVER, 10) == (5, {"run": 4})
    assert wanted_epoch(said(4, at_ms=10), 3, NEVER, 10) == (5, {"run": 4})
    assert wanted_epoch(said(-1, event=True), -1, NEVER, 10) == (0, {"run": -1})


def test_one_epoch_is_answered_once() -> None:
    """Or a file that nobody writes any more would make batches without end."""
    wanted, answered = wanted_epoch(said(4, event=True), 3, NEVER, 10)
    assert wanted_epoch(said(4, event=True), wanted, answered, 20) == (wanted, answered)
    assert wanted_epoch(said(5, event=True), wanted, answered, 20) == (6, {"run": 5})


def test_of_two_queries_over_a_frame_neither_hides_what_the_other_wants() -> None:
    quiet = {"watermark_moves": False, "processing_due_ms": None}
    due = {"watermark_moves": False, "processing_due_ms": 10}
    text = json.dumps({"far": {"epoch": 90, **quiet}, "near": {"epoch": 4, **due}}).encode()
    assert wanted_epoch(text, 3, {"far": 89}, 10) == (5, {"far": 89, "near": 4})
    both = json.dumps({"far": {"epoch": 90, **due}, "near": {"epoch": 4, **due}}).encode()
    wanted, answered = wanted_epoch(both, 3, NEVER, 10)
    assert (wanted, answered) == (92, {"far": 90, "near": 4})
    assert wanted_epoch(both, wanted, answered, 20) == (wanted, answered), "each once"


def test_a_run_that_has_ended_leaves_what_another_says() -> None:
    file = HeartbeatFile()
    for run in ("one", "two"):
        file.write(run, 1, watermark_moves=True, processing_due_ms=None)
    file.remove("one")
    file.write("one", 2, watermark_moves=True, processing_due_ms=None)  # an ack that came late
    assert list(json.loads(Path(file.path).read_text())) == ["two"]


def test_an_offset_that_lies_ahead_still_moves() -> None:
    """As in a checkpoint location that was restored from a copy."""
    assert wanted_epoch(said(4, event=True), 8, NEVER, 10) == (9, {"run": 4})


def test_the_file_lives_as_long_as_the_object_and_survives_a_cleaner() -> None:
    file = HeartbeatFile()
    file.write("run", 0, watermark_moves=True, processing_due_ms=None)
    path = Path(file.path)
    assert json.loads(path.read_text()) == {
        "run": {"epoch": 0, "watermark_moves": True, "processing_due_ms": None}
    }
    path.unlink()
    path.parent.rmdir()
    file.write("run", 1, watermark_moves=False, processing_due_ms=5)
    assert json.loads(path.read_text())["run"]["epoch"] == 1
    assert path.parent.stat().st_mode & 0o077 == 0, "nobody else reads it"
    file.remove("run")
    file.remove("run")
    assert not path.exists()
    del file
    gc.collect()
    assert not path.parent.exists()


@pytest.mark.parametrize("event", [True, False])
def test_both_kinds_of_time_are_looked_at(event: bool) -> None:
    text = said(7, event=event, at_ms=None if event else 99)
    assert wanted_epoch(text, 7, NEVER, 99)[0] == 8


def test_available_now_is_refused_where_spark_asks_only_at_the_start() -> None:
    with pytest.raises(UnsupportedQueryError, match="availableNow"):
        check_trigger("AvailableNowTrigger$", asked_at_the_end=False)
    check_trigger("AvailableNowTrigger$", asked_at_the_end=True)
    check_trigger("ProcessingTimeTrigger", asked_at_the_end=False)
