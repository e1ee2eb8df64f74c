"""One epoch of one operator: who has acked, and what is durable of it."""

from __future__ import annotations

from snapshot.epoch import Acked, EpochState
from snapshot.messages import AckRequest
from tests.recovery.driver import ack_of, part_of

START = "00" * 32


def ack(subtask: int, attempt: int = 0, content: bytes = b"x") -> AckRequest:
    return ack_of(START, part_of({b"k": content}), 0, subtask, attempt=attempt)


def test_an_epoch_is_complete_when_the_last_subtask_has_acked() -> None:
    epoch = EpochState(3)
    assert epoch.take(ack(2)) is Acked.PARTIAL
    assert epoch.missing() == [0, 1]
    assert epoch.take(ack(0)) is Acked.PARTIAL
    assert epoch.take_due() is None
    assert epoch.take(ack(1)) is Acked.COMPLETE
    assert epoch.missing() == []
    assert not epoch.complete


def test_it_is_complete_for_good_only_when_durable() -> None:
    epoch = EpochState(1)
    epoch.take(ack(0))
    due = epoch.take_due()
    assert due == {0: ack(0)}
    epoch.made_durable(due)
    assert epoch.complete
    assert epoch.take_due() is None


def test_an_ack_of_one_subtask_twice_does_not_count_for_another() -> None:
    epoch = EpochState(2)
    assert epoch.take(ack(0)) is Acked.PARTIAL
    assert epoch.take(ack(0, attempt=1)) is Acked.PARTIAL
    assert epoch.missing() == [1]


def test_an_older_attempt_is_stale_and_changes_nothing() -> None:
    epoch = EpochState(1)
    epoch.take(ack(0, attempt=5, content=b"new"))
    assert epoch.take(ack(0, attempt=4, content=b"old")) is Acked.STALE
    assert epoch.take_due() == {0: ack(0, attempt=5, content=b"new")}


def test_the_same_attempt_may_ack_again() -> None:
    epoch = EpochState(1)
    assert epoch.take(ack(0)) is Acked.COMPLETE
    assert epoch.take(ack(0)) is Acked.COMPLETE


def test_only_another_content_is_worth_another_record() -> None:
    epoch = EpochState(2)
    epoch.take(ack(0))
    epoch.take(ack(1))
    due = epoch.take_due()
    assert due is not None
    epoch.made_durable(due)
    epoch.take(ack(1, attempt=1))
    assert epoch.take_due() is None
    epoch.take(ack(1, attempt=2, content=b"other"))
    assert epoch.take_due() == {0: ack(0), 1: ack(1, attempt=2, content=b"other")}
    assert epoch.complete  # with what was durable before, until the new record is


def test_what_is_taken_for_a_record_does_not_change_under_it() -> None:
    epoch = EpochState(1)
    epoch.take(ack(0))
    due = epoch.take_due()
    assert due is not None
    epoch.take(ack(0, attempt=1, content=b"other"))
    assert due == {0: ack(0)}
    epoch.made_durable(due)
    assert epoch.take_due() == {0: ack(0, attempt=1, content=b"other")}
