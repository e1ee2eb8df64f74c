"""What a deletion means in an epoch that the user gave up: it did not happen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from snapshot.lineage import resolve
from snapshot.record import Manifest
from statebackend.spark.startpoint import StartPoint
from tests.recovery import driver
from tests.recovery.driver import Run

DELETED = {"op": {"dropped": {"s\0" + "1": 1}}}


def point_of() -> StartPoint:
    operators = cast("Any", {"op": SimpleNamespace(parallelism=1)})
    return StartPoint(cast("Any", None), cast("Any", None), operators, run="run")


def possible(records: list[Manifest]) -> list[int]:
    point = point_of()
    last = max(record.epoch for record in records)
    return [epoch for epoch in range(last + 1) if point._has_state(records, epoch)]


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
    due = back.coordinator.next_due()
    assert due is not None
    assert due.epoch == 1
    assert back.begin(2).dropped == ()
    for epoch in (2, 3):
        back.finish(epoch)
    assert back.records[-1].dropped_ids == []
    assert possible(back.records) == [0, 1, 2, 3]
