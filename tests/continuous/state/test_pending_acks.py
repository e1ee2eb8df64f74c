"""Acks of one attempt, and what would happen without holding them back."""

from __future__ import annotations

import pytest
from blake3 import blake3

from snapshot.protocol.lineage import resolve
from snapshot.protocol.messages import AckReply, AckRequest, SlicePart
from snapshot.storage.memory_store import MemoryStore
from statebackend.continuous.driver.pending_acks import PendingAcks
from statebackend.errors import ProtocolError
from tests.recovery.driver import Started, ack_of, begin_of, manifests_of, part_of

CHAIN = "00" * 32


def an_ack(operator: str, subtask: int, attempt: int, word: str = "") -> AckRequest:
    changes = {b"k": f"{operator}{subtask}{attempt}{word}".encode()}
    return ack_of(CHAIN, part_of(changes), 0, subtask, operator, attempt=attempt)


class Log:
    def __init__(self) -> None:
        self.acks: list[tuple[str, int, int]] = []

    def ack(self, request: AckRequest) -> AckReply:
        self.acks.append((request.operator, request.subtask, request.attempt))
        return AckReply(durable=True)


def test_nothing_is_said_before_all_have_acked_one_attempt() -> None:
    log = Log()
    held = PendingAcks(log, {"b": 2, "a": 1})
    assert not held.take(an_ack("b", 1, 1))
    assert not held.take(an_ack("b", 0, 1))
    assert not held.take(an_ack("b", 0, 1))  # twice the same
    assert not held.take(an_ack("a", 0, 2)), "of another attempt"
    held.drop(1)
    assert not held.take(an_ack("b", 0, 2))
    assert held.take(an_ack("b", 1, 2))
    assert log.acks == []
    assert held.commit(2) == 0
    assert log.acks == [("a", 0, 2), ("b", 0, 2), ("b", 1, 2)]


def test_acks_of_nobody_and_damaged_ones_are_refused() -> None:
    held = PendingAcks(Log(), {"a": 1})
    for wrong in (an_ack("a", 1, 1), an_ack("x", 0, 1)):
        with pytest.raises(ProtocolError, match="no subtask"):
            held.take(wrong)
    good = part_of({b"k": b"v"})
    bent = SlicePart(digest=blake3(b"x").hexdigest(), size_bytes=1, rows=1, data=good.data)
    with pytest.raises(ProtocolError, match="damaged"):
        held.take(ack_of(CHAIN, bent, 0, 0, "a", attempt=1))


def test_a_crash_between_two_records_leaves_the_epoch_before() -> None:
    """The vertex whose record is written last decides; it is always the same one."""
    store = MemoryStore()

    def run(attempt: int, records: int) -> None:
        started = Started(store, {"a": 1, "b": 1}, first_epoch=0)
        held = PendingAcks(started.session, {"a": 1, "b": 1})
        for uid in ("b", "a"):  # whoever comes first
            reply, _ = started.session.begin(begin_of(0, 0, uid))
            part = part_of({b"k": f"{uid}{attempt}".encode()})
            held.take(ack_of(reply.chain, part, 0, 0, uid, attempt=attempt))
        if records == 1:  # the driver dies after the first of them
            first = min(held._held[attempt].items())[1]
            started.session.ack(first)
            return
        held.commit(attempt)

    def complete() -> set[str]:
        known = resolve(manifests_of(store))
        return {uid for uid, one in known.items() if one.last_epoch >= 0}

    run(1, 1)
    assert complete() == {"a"}
    run(2, 1)
    assert complete() == {"a"}, "never the one's old record beside the other's new one"
    run(3, 2)
    assert complete() == {"a", "b"}
    newest = [one for one in manifests_of(store) if one.kind == "checkpoint"][-2:]
    assert [entry.attempt for one in newest for entry in one.slices] == [3, 3]
