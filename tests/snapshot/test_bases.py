"""When full state is written, and whose right it is: the policy and its grants."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot.formats.record import SliceEntry
from snapshot.protocol.base_leases import BaseBook
from snapshot.protocol.base_policy import BasePolicy, Due, due
from snapshot.protocol.lineage import OperatorLineage, SliceRef, SubtaskLineage
from snapshot.protocol.messages import BaseDone, BeginRequest
from statebackend.errors import StaleRequestError
from tests.recovery.driver import PROTOCOL, new_id, part_of
from tests.snapshot.hand_clock import Now


def asked() -> BeginRequest:
    """A request that is no other one."""
    return cast("BeginRequest", object())


def entry_of(kind: str, epoch: int, size_bytes: int, state_bytes: int = 0) -> SliceRef:
    entry = SliceEntry(
        operator="op",
        subtask=0,
        kind=kind,  # type: ignore[arg-type]
        epoch=epoch,
        key_group_start=0,
        key_group_end=7,
        attempt=0,
        rows=1,
        size_bytes=size_bytes,
        digest="",
        chain="",
        object=None,
        state_bytes=state_bytes,
    )
    return SliceRef(epoch, entry)


def lineage_of(
    deltas: dict[int, int], base: tuple[int, int] | None = None, start: int = -1
) -> SubtaskLineage:
    """By epoch the bytes of deltas; a base's epoch and the state's bytes."""
    made = OperatorLineage.new(
        "op", job_id="j", parallelism=1, max_parallelism=8, first_epoch=start + 1
    ).subtasks[0]
    made.deltas = {epoch: entry_of("delta", epoch, size) for epoch, size in deltas.items()}
    if base is not None:
        made.bases = {base[0]: entry_of("files", base[0], 100, base[1])}
    return made


# --- the policy ----------------------------------------------------------------------------------


LARGE = BasePolicy(
    every_epochs=8, apart_every_epochs=20, apart_min_bytes=1000, apart_ratio=0.5, open_limit=2
)


def large_due(lineage: SubtaskLineage, epoch: int, subtask: int = 0, parallelism: int = 1) -> Due:
    return due(
        LARGE,
        lineage,
        subtask=subtask,
        parallelism=parallelism,
        epoch=epoch,
        large_bytes=10_000,
    )


@pytest.mark.parametrize(
    ("state_bytes", "delta_bytes", "expected"),
    [
        (100, 999, Due.NOTHING),  # below the least
        (100, 1000, Due.APART),
        (10_000, 4999, Due.NOTHING),  # below its share of the state
        (10_000, 5000, Due.APART),
    ],
)
def test_large_state_is_written_when_enough_has_changed(
    state_bytes: int, delta_bytes: int, expected: Due
) -> None:
    lineage = lineage_of({4: 0, 5: delta_bytes}, base=(3, state_bytes))
    assert large_due(lineage, 6) is expected
    # What was before the base does not count.
    lineage.deltas[2] = entry_of("delta", 2, 10**9)
    assert large_due(lineage, 6) is expected


def test_large_state_without_a_base_is_measured_by_what_it_was_found_to_be() -> None:
    assert large_due(lineage_of({0: 4000}), 1) is Due.NOTHING
    assert large_due(lineage_of({0: 5000}), 1) is Due.APART


def test_large_state_is_written_at_least_once_in_so_many_epochs() -> None:
    lineage = lineage_of(dict.fromkeys(range(50), 0), base=(3, 10))
    assert next(e for e in range(4, 40) if large_due(lineage, e) is Due.APART) == 3 + 20 + 1


@pytest.mark.full  # thousands of epochs
@given(parallelism=st.integers(1, 64), every=st.integers(1, 300))
def test_large_states_do_not_come_due_together(parallelism: int, every: int) -> None:
    policy = BasePolicy(apart_every_epochs=every)
    lineage = lineage_of(dict.fromkeys(range(400), 0), base=(-1, 10))

    def first(subtask: int) -> int:
        return next(
            epoch
            for epoch in range(401)
            if due(
                policy,
                lineage,
                subtask=subtask,
                parallelism=parallelism,
                epoch=epoch,
                large_bytes=1,
            )
            is Due.APART
        )

    dues = [first(subtask) for subtask in range(parallelism)]
    assert all(every // 2 <= epoch <= every for epoch in dues)
    most = max(dues.count(epoch) for epoch in dues)
    assert most <= parallelism / max(1, every / 2) + 1


@given(parallelism=st.integers(2, 40), every=st.integers(2, 100))
def test_small_states_are_staggered(parallelism: int, every: int) -> None:
    policy, lineage = BasePolicy(every_epochs=every), lineage_of({})

    def dues(epoch: int) -> int:
        asked = (
            due(policy, lineage, subtask=s, parallelism=parallelism, epoch=epoch, large_bytes=0)
            for s in range(parallelism)
        )
        return sum(one is Due.INLINE for one in asked)

    counts = [dues(epoch) for epoch in range(1, every + 1)]
    assert sum(counts) == parallelism  # each once
    assert max(counts) <= -(-parallelism // every)
    assert dues(0) == 0  # nothing to write yet


# --- grants --------------------------------------------------------------------------------------


def book(now_s: Callable[[], float] = lambda: 0.0, **policy: float) -> BaseBook:
    return BaseBook(BasePolicy(**policy), now_s, new_id)  # type: ignore[arg-type]


def done(
    grant: str, subtask: int = 0, epoch: int = 1, chain: str = "c", state_bytes: int = 10**6
) -> BaseDone:
    part = part_of({b"k": b"base"})
    return BaseDone(
        protocol=PROTOCOL,
        job="job",
        session="session",
        operator="op",
        subtask=subtask,
        grant=grant,
        epoch=epoch,
        chain=chain,
        kind="base",
        part=part,
        state_bytes=state_bytes,
        uploaded_bytes=1,
        seconds=0.0,
    )


def test_no_more_than_so_many_are_uploaded_at_the_same_time() -> None:
    one = book(open_limit=2)
    grants = [one.grant(n, 1, "c", asked()) for n in range(3)]
    assert [grant is not None for grant in grants] == [True, True, False]
    assert one.grant(0, 2, "d", asked()) is None  # it has one
    assert grants[0] is not None
    one.finish(done(grants[0].id))
    assert one.grant(0, 2, "d", asked()) is None  # it waits for its record
    assert one.grant(2, 2, "d", asked()) is not None  # and makes room meanwhile


def test_a_grant_that_is_not_renewed_lapses_and_another_may_be_given() -> None:
    now = Now()
    one = book(now, lease_s=10, open_limit=1)
    first = one.grant(0, 1, "c", asked())
    assert first is not None
    for _ in range(5):
        now.time_s += 9
        one.renew(0, first.id)
    assert one.open_grants() == {first.id}
    now.time_s += 10.5
    assert one.open_grants() == set()
    for call in (lambda: one.renew(0, first.id), lambda: one.finish(done(first.id))):
        with pytest.raises(StaleRequestError):
            call()
    second = one.grant(0, 2, "d", asked())
    assert second is not None
    assert second.id != first.id
    for call in (lambda: one.renew(0, first.id), lambda: one.finish(done(first.id))):
        with pytest.raises(StaleRequestError):
            call()
    one.finish(done(second.id, epoch=2, chain="d"))
    assert one.open_grants() == {second.id}
    now.time_s += 1000
    assert one.open_grants() == {second.id}  # what waits for its record does not lapse


def test_the_same_request_gets_the_same_grant_and_another_one_gets_none() -> None:
    one, request = book(Now(), lease_s=10, open_limit=1), asked()
    first = one.grant(0, 1, "c", request)
    assert first is not None
    assert one.grant(0, 1, "c", request) is first, "its answer was lost"
    assert one.grant(0, 1, "c", asked()) is None
    one.finish(done(first.id))
    assert one.grant(0, 1, "c", request) is None, "its base waits for a record"


def test_a_grant_that_is_given_up_makes_room_at_once_and_only_its_holder_can() -> None:
    one = book(open_limit=1)
    first = one.grant(0, 1, "c", asked())
    assert first is not None
    with pytest.raises(StaleRequestError):
        one.give_up(0, "another")
    assert one.grant(1, 1, "c", asked()) is None
    one.give_up(0, first.id)
    assert one.open_grants() == set()
    assert one.grant(1, 1, "c", asked()) is not None
    for late in (lambda: one.give_up(0, first.id), lambda: one.finish(done(first.id))):
        with pytest.raises(StaleRequestError):
            late()


@pytest.mark.parametrize("change", [{"epoch": 2}, {"chain": "d"}])
def test_a_base_of_another_state_than_was_granted_is_refused(change: dict[str, object]) -> None:
    one = book()
    grant = one.grant(0, 1, "c", asked())
    assert grant is not None
    with pytest.raises(StaleRequestError, match="not of the state"):
        one.finish(done(grant.id, **change))  # type: ignore[arg-type]
    assert not one.waiting
    assert not one.open_grants()
