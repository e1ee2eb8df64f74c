"""A store whose writes wait at a gate, and epochs that run while they wait."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import TimeoutError as NotYet
from typing import Any

from snapshot.protocol.messages import AckReply, BeginReply
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.object_store import Buffer, CreateOutcome
from tests.recovery.driver import Changes, Started, ack_of, begin_of, part_of

LONG_S = 30.0


class HeldUp(MemoryStore):
    """Creates wait at a gate, and fail as they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.failure: BaseException | None = None

    def create(self, name: str, parts: Sequence[Buffer]) -> CreateOutcome:
        assert self.gate.wait(LONG_S)
        if self.failure is not None:
            raise self.failure
        return super().create(name, parts)


def begun(started: Started, epoch: int, subtask: int = 0, attempt: int = 0) -> BeginReply:
    return started.session.begin(begin_of(epoch, subtask, attempt=attempt))[0]


def acked(
    started: Started, reply: BeginReply, changes: Changes, subtask: int = 0, attempt: int = 0
) -> AckReply:
    ack = ack_of(reply.chain, part_of(changes), reply.base_epoch + 1, subtask, attempt=attempt)
    return started.session.ack(ack)


def epoch_of(started: Started, epoch: int, parallelism: int = 1) -> None:
    replies = [begun(started, epoch, n) for n in range(parallelism)]
    for n, reply in enumerate(replies):
        assert not acked(started, reply, {b"k": b"%d" % epoch}, n).durable


def drained(started: Started) -> None:
    started.session.drain(LONG_S)


def still_waits(future: Any) -> bool:
    try:
        future.result(0.2)
    except NotYet:
        return True
    return False
