"""One epoch of one operator: who has acked, and what is durable of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from snapshot.protocol.epoch_acks import Acked, EpochState
from snapshot.protocol.messages import AckRequest, Use
from tests.recovery.driver import ack_of, part_of

START = "00" * 32


def ack(
    subtask: int, attempt: int = 0, content: bytes = b"x", use: Use | None = None
) -> AckRequest:
    return ack_of(START, part_of({b"k": content}), 0, subtask, attempt=attempt, use=use)


def of(execution: int, subtask: int, attempt: int = 0, *, stage: int | None = None) -> AckRequest:
    """An ack whose content says which evaluation and attempt it is of."""
    stage = 10 * execution if stage is None else stage
    content = b"%d %d %d" % (execution, stage, attempt)
    return ack(subtask, attempt, content, Use(stage, subtask, execution))


def counting(epoch: EpochState) -> dict[int, tuple[int, int]]:
    """By subtask: execution and attempt of the ack that counts."""
    return {s: (one.use.execution, one.attempt) for s, one in sorted(epoch.acks.items())}


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


# --- several evaluations -------------------------------------------------------------------------


def test_a_later_evaluation_counts_once_it_is_whole() -> None:
    epoch = EpochState(2)
    for subtask in range(2):
        epoch.take(of(1, subtask))
    first = epoch.take_due()
    assert first is not None
    epoch.made_durable(first)
    assert epoch.take(of(2, 1, attempt=7)) is Acked.COMPLETE
    assert epoch.take_due() is None, "a look at some rows changes nothing"
    assert counting(epoch) == {0: (1, 0), 1: (1, 0)}
    epoch.take(of(2, 0, attempt=8))
    assert epoch.take_due() == {0: of(2, 0, attempt=8), 1: of(2, 1, attempt=7)}


def test_an_older_evaluation_that_is_whole_later_changes_nothing_and_is_not_refused() -> None:
    epoch = EpochState(2)
    assert epoch.take(of(1, 0, attempt=1)) is Acked.PARTIAL
    for subtask in range(2):
        epoch.take(of(2, subtask, attempt=5 + subtask))
    due = epoch.take_due()
    assert epoch.take(of(1, 1, attempt=2)) is Acked.COMPLETE
    assert epoch.take_due() is None
    assert epoch.recorded is due


def test_the_older_of_two_overlapping_stages_of_one_evaluation_is_not_refused() -> None:
    # A join of the output with itself: both are needed, and either may be first.
    epoch = EpochState(2)
    for subtask in range(2):
        epoch.take(of(1, subtask, attempt=4 + subtask, stage=38))
        assert epoch.take(of(1, subtask, attempt=subtask, stage=37)) is not Acked.STALE
    assert epoch.take_due() == {s: of(1, s, attempt=4 + s, stage=38) for s in range(2)}


def test_the_older_of_two_tasks_of_one_stage_is_not_refused() -> None:
    # The output united with itself: partition 3 is subtask 1 once more.
    epoch = EpochState(2)
    newer, older = ack(1, 9, use=Use(0, 3)), ack(1, 8, b"other", Use(0, 1))
    epoch.take(newer)
    assert epoch.take(older) is Acked.PARTIAL
    assert epoch.take(ack(1, 10, b"third", Use(0, 1))) is Acked.PARTIAL, "tried again"
    assert epoch.acks == {1: newer}


def test_parts_that_are_evaluated_alone_again_count_within_their_evaluation() -> None:
    # An executor was lost with outputs between two stages of adaptive execution.
    epoch = EpochState(3)
    for subtask in range(3):
        epoch.take(of(1, subtask, stage=5))
    epoch.take_due()
    epoch.take(of(1, 1, attempt=9, stage=7))
    due = epoch.take_due()
    assert due is not None
    assert [due[s].use.stage for s in range(3)] == [5, 7, 5]


def test_parts_of_several_evaluations_are_an_epoch_where_none_is_whole() -> None:
    epoch = EpochState(3)
    assert epoch.take(of(1, 0)) is Acked.PARTIAL
    assert epoch.take(of(2, 1)) is Acked.PARTIAL
    assert epoch.missing() == [2]
    assert epoch.take(of(3, 2)) is Acked.COMPLETE
    assert counting(epoch) == {0: (1, 0), 1: (2, 0), 2: (3, 0)}
    assert epoch.take(of(4, 2)) is Acked.COMPLETE
    assert counting(epoch)[2] == (4, 0)


def test_the_later_evaluation_is_the_one_with_the_later_stages() -> None:
    # An action on a frame's RDD is part of the batch's own execution, which began first.
    epoch = EpochState(2)
    for execution, stage in ((1, 5), (8, 20), (1, 25), (9, 30)):
        for subtask in range(2):
            epoch.take(of(execution, subtask, stage=stage))
        assert counting(epoch) == {0: (execution, 0), 1: (execution, 0)}
        epoch.take(of(execution + 1, 0, stage=stage + 1))
        assert epoch.take(of(3, 0, stage=2)) is Acked.COMPLETE, "an old one, late"
        assert counting(epoch) == {0: (execution, 0), 1: (execution, 0)}


def test_looks_without_end_are_forgotten() -> None:
    epoch = EpochState(2)
    for subtask in range(2):
        epoch.take(of(0, subtask))
    for look in range(1, 1000):
        assert epoch.take(of(look, 0)) is Acked.COMPLETE
    assert len(list(epoch.all_acks())) < 100
    assert counting(epoch) == {0: (0, 0), 1: (0, 0)}
    for subtask in range(2):
        epoch.take(of(1000, subtask))
    assert counting(epoch) == {0: (1000, 0), 1: (1000, 0)}
    assert len(list(epoch.all_acks())) == 4


def test_looks_beside_an_evaluation_do_not_keep_it_from_becoming_whole() -> None:
    epoch = EpochState(3)
    for subtask in (1, 2):
        epoch.take(of(1, subtask))
    for look in range(2, 40):
        epoch.take(of(look, 0))
    epoch.take(of(1, 0))
    assert counting(epoch) == {0: (1, 0), 1: (1, 0), 2: (1, 0)}


@given(
    st.integers(1, 4).flatmap(
        lambda parallelism: st.tuples(
            st.just(parallelism),
            st.lists(st.tuples(st.integers(0, 3), st.integers(0, parallelism - 1)), max_size=40),
        )
    )
)
def test_a_record_is_of_one_whole_evaluation_if_there_is_one(
    run: tuple[int, list[tuple[int, int]]],
) -> None:
    parallelism, acks = run
    epoch = EpochState(parallelism)
    seen: dict[int, set[int]] = {}
    for attempt, (execution, subtask) in enumerate(acks):
        outcome = epoch.take(of(execution, subtask, attempt))
        seen.setdefault(execution, set()).add(subtask)
        whole = [n for n, subtasks in seen.items() if len(subtasks) == parallelism]
        known = set().union(*seen.values())
        assert outcome is (Acked.COMPLETE if len(known) == parallelism else Acked.PARTIAL)
        assert epoch.missing() == sorted(set(range(parallelism)) - known)
        due = epoch.take_due()
        if whole and due is not None:
            assert {one.use.execution for one in due.values()} == {max(whole)}
        if outcome is Acked.COMPLETE:
            assert {s: one.chain for s, one in epoch.recorded.items()} == {
                s: one.chain for s, one in epoch.acks.items()
            }, "what is answered follows from what is recorded"
