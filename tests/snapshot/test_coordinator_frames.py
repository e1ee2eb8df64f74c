"""Whose frame an epoch is of: the coordinator refuses frames that were kept, by their stamps."""

from __future__ import annotations

import pytest

from statebackend.errors import WrongBatchError
from tests.recovery.driver import Run, stamp_of

# --- stamps --------------------------------------------------------------------------------------


def test_a_kept_frame_is_refused_after_the_batchs_own() -> None:
    run = Run(1)
    run.finish(0)
    run.begin(1)
    with pytest.raises(WrongBatchError, match="batch 1"):
        run.begin(1, stamp_ms=stamp_of(0))


def test_a_kept_frame_is_refused_before_the_batchs_own_and_does_not_take_its_place() -> None:
    run = Run(1)
    run.finish(0)
    with pytest.raises(WrongBatchError, match="batch 1"):
        run.begin(1, stamp_ms=stamp_of(0))
    assert run.begin(1).base_epoch == 0
    run.ack(1)
    run.commit()
    run.begin(2)


def test_a_frame_kept_since_the_batch_before_last_is_refused() -> None:
    run = Run(1)
    run.finish(0)
    run.finish(1)
    with pytest.raises(WrongBatchError):
        run.begin(2, stamp_ms=stamp_of(0))
    run.begin(2)


@pytest.mark.parametrize("kept", [0, 1])
def test_a_frame_kept_for_longer_is_refused_too(kept: int) -> None:
    run = Run(1)
    for epoch in range(4):
        run.finish(epoch)
    with pytest.raises(WrongBatchError):
        run.begin(4, stamp_ms=stamp_of(kept))
    run.begin(4)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_frame_kept_over_a_restart_in_one_process_is_refused(kept: int) -> None:
    run = Run(1)
    for epoch in range(3):
        run.finish(epoch)
    later = run.again(same_process=True)
    with pytest.raises(WrongBatchError):
        later.begin(3, stamp_ms=stamp_of(kept))
    later.begin(3)


@pytest.mark.parametrize("earlier", range(3))
def test_an_epoch_may_have_the_time_of_any_earlier_one(earlier: int) -> None:
    run = Run(2)
    for epoch in range(3):
        run.finish(epoch)
    for same_process in (True, False):
        later = run.again(same_process=same_process)
        for subtask in range(2):
            later.begin(3, subtask, stamp_ms=stamp_of(earlier), nonce=7)
            later.ack(3, subtask, stamp_ms=stamp_of(earlier))
        later.commit()
        assert later.records[-1].stamp_ms == stamp_of(earlier)
        later.begin(4, stamp_ms=stamp_of(earlier), nonce=8)
        run = Run(2, records=run.records[:3])


def test_a_kept_frame_is_refused_where_the_time_is_the_same() -> None:
    run = Run(2)
    for epoch in range(3):
        for subtask in range(2):
            run.begin(epoch, subtask, stamp_ms=5, nonce=10 * epoch + subtask)
            run.ack(epoch, subtask, stamp_ms=5)
        run.commit()
    for kept in range(3):
        with pytest.raises(WrongBatchError):  # before the batch's own, and after it
            run.begin(3, 1, stamp_ms=5, nonce=10 * kept + 1)
    run.begin(3, 0, stamp_ms=5, nonce=30)
    for kept in range(3):
        for subtask in range(2):
            with pytest.raises(WrongBatchError):
                run.begin(3, subtask, stamp_ms=5, nonce=10 * kept + subtask)
    run.begin(3, 1, stamp_ms=5, nonce=0)  # what another subtask's number was says nothing


def test_an_epoch_that_is_repeated_in_one_process_has_a_frame_of_its_own() -> None:
    run = Run(1)
    run.finish(0)
    run.begin(1, nonce=1)
    later = run.again(same_process=True)
    with pytest.raises(WrongBatchError):
        later.begin(1, nonce=1)
    later.begin(1, nonce=2)


def test_a_repeated_epoch_keeps_its_stamp_after_a_restart() -> None:
    run = Run(1)
    for epoch in range(3):
        run.finish(epoch)
    later = run.again()
    later.finish(2)
    assert later.records[-1].stamp_ms == stamp_of(2)
    later.finish(3)


def test_an_epoch_that_was_given_up_may_get_another_stamp() -> None:
    # Its offsets were never written: Spark plans the batch anew.
    run = Run(1)
    run.finish(0)
    run.begin(1)
    later = run.again()
    later.finish(1, stamp_ms=stamp_of(1) + 77)
    assert later.records[-1].stamp_ms == stamp_of(1) + 77


def test_an_ack_with_another_stamp_is_refused() -> None:
    run = Run(1)
    run.finish(0)
    run.begin(1)
    with pytest.raises(WrongBatchError):
        run.ack(1, stamp_ms=stamp_of(0))
    assert run.commit() is None
