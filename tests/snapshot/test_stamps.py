"""Which frames are of the running epoch, whatever their time is."""

from __future__ import annotations

from array import array

import pytest

from snapshot.protocol import stamps as module
from snapshot.protocol.stamps import Stamps


def bound(count: int, before: Stamps | None = None) -> Stamps:
    """So many epochs, all with one time, each with a frame of two subtasks."""
    stamps = Stamps(before)
    for epoch in range(count):
        assert stamps.bind(5, "op", 0, epoch)
        assert stamps.admit(5, "op", 1, epoch)
    return stamps


def test_a_frame_is_known_by_each_of_its_subtasks() -> None:
    stamps = bound(3)
    assert stamps.admit(5, "op", 0, 2), "of the running epoch, again"
    for subtask in range(2):
        for kept in range(2):
            assert not stamps.admit(5, "op", subtask, kept)
            assert not stamps.bind(5, "op", subtask, kept)
    assert not stamps.bind(5, "op", 0, 2), "the next epoch has another one"
    assert stamps.bind(5, "op", 0, 3)


def test_a_frame_with_another_time_is_not_of_the_epoch() -> None:
    stamps = bound(1)
    assert not stamps.admit(4, "op", 0, 7)
    assert not stamps.admit(6, "op", 0, 7)


def test_two_plans_of_one_batch_are_both_of_its_epoch() -> None:
    # The output that is united with itself in the query: Spark draws for each half.
    stamps = bound(1)
    assert stamps.admit(5, "op", 0, 7)
    assert stamps.bind(5, "op", 0, 8)
    assert not stamps.admit(5, "op", 0, 7)


def test_the_next_run_knows_them_and_does_not_change_what_this_one_knows() -> None:
    stamps = bound(2)
    later = Stamps(stamps)
    assert not later.bind(5, "op", 1, 0)
    assert not later.bind(5, "op", 1, 1)
    assert later.bind(5, "op", 1, 2)
    assert stamps.bind(5, "op", 1, 2)


@pytest.mark.parametrize("limit", ["_EPOCHS_KEPT", "_NONCES_KEPT"])
def test_what_is_remembered_is_bounded(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, limit, 10)
    stamps = bound(100)
    assert len(stamps._order) <= 10
    assert sum(len(same) for same in stamps._older.values()) == len(stamps._order)
    if limit == "_NONCES_KEPT":
        assert sum(len(seen) for _, seen in stamps._order) <= 10
    assert not stamps.admit(5, "op", 0, 97), "the newest are known"
    assert stamps.admit(5, "op", 0, 0), "the oldest are not"
    wide = Stamps()
    for epoch in range(3):  # more subtasks than the bound: one epoch at least
        assert wide.bind(5, "op", 0, epoch)
        assert all(wide.admit(5, "op", subtask, epoch) for subtask in range(1, 50))
    assert not wide.admit(5, "op", 49, 1)


def test_64_mb_of_nonces_are_remembered_and_then_the_oldest_epoch_is_forgotten() -> None:
    subtasks = 1 << 20
    others = bytes(8 * (subtasks - 1))

    def over(stamps: Stamps, epoch: int) -> None:
        seen = array("q", [hash(("op", 0, epoch))])
        seen.frombytes(others)
        stamps._keep(epoch, seen)

    def known(stamps: Stamps, epoch: int) -> bool:
        return not Stamps(stamps).bind(epoch, "op", 0, epoch)

    stamps = Stamps()
    for epoch in range(8):
        over(stamps, epoch)
    assert sum(seen.itemsize * len(seen) for _, seen in stamps._order) == 64 << 20
    assert known(stamps, 0), "all are known that there is room for"
    over(stamps, 8)
    assert sum(seen.itemsize * len(seen) for _, seen in stamps._order) == 64 << 20
    assert [known(stamps, epoch) for epoch in range(9)] == [False] + [True] * 8
