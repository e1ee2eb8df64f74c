"""What a deletion means in an epoch that the user gave up: it did not happen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from recovery.decide.live_lineages import ResolvedOnce
from snapshot.formats.record import Manifest
from snapshot.protocol.lineage import resolve
from statebackend.spark.start.start_point import StartPoint
from tests.recovery import driver
from tests.recovery.driver import Run

DELETED = {"op": {"dropped": {"s\0" + "1": 1}}}


def point_of(*declared: str) -> StartPoint:
    operators = cast("Any", {"op": SimpleNamespace(parallelism=1, states=declared)})
    job = cast("Any", SimpleNamespace(resolved=ResolvedOnce()))
    return StartPoint(job, cast("Any", None), operators, run="run")


def possible(records: list[Manifest], *declared: str) -> list[int]:
    point = point_of(*declared)
    last = max(record.epoch for record in records)
    return [epoch for epoch in range(last + 1) if point._asked.has_state(records, epoch)]


def test_a_deletion_that_was_given_up_did_not_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(1)
    for epoch in range(3):
        run.finish(epoch)
    later = run.again(specs=DELETED)
    for epoch in (3, 4):
        later.finish(epoch)
    assert possible(run.records) == [3, 4]
    point = point_of()
    point._given_up, point.first_epoch = 4, 2
    lineages = resolve(run.records)
    point.forget_given_up(lineages.values())
    monkeypatch.setattr(driver, "resolve", lambda records: lineages)
    back = run.again(first_epoch=2, specs={})
    due = back.coordinator.run.next_due()
    assert due is not None
    assert due.epoch == 1
    assert back.begin(2).dropped == ()
    for epoch in (2, 3):
        back.finish(epoch)
    assert back.records[-1].dropped_ids == []
    assert possible(back.records) == [0, 1, 2, 3]


def test_an_epoch_before_a_state_was_left_out_is_none_for_a_start_that_declares_it() -> None:
    """Its entries are there, under the id that it had; the name has another one now, or none."""
    run = Run(1, specs={"op": {"states": {"kept": 1, "gone": 2}}})
    for epoch in range(2):
        run.finish(epoch)
    without = {"op": {"states": {"kept": 1, "gone\0" + "2": 2}}}
    later = run.again(specs=without)
    for epoch in (2, 3):
        later.finish(epoch)
    assert possible(run.records, "kept", "gone") == [2, 3]
    assert possible(run.records, "kept", "another") == [0, 1, 2, 3]
    again = {"op": {"states": {**without["op"]["states"], "gone": 3}}}
    last = later.again(specs=again)
    for epoch in (4, 5):
        last.finish(epoch)
    assert possible(run.records, "kept", "gone") == [2, 3, 4, 5]
    assert possible(run.records, "kept") == [0, 1, 2, 3, 4, 5]
