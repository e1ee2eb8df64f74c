"""Looks up entries in the stores that this process has open, for the driver that asks.

RocksDB holds confirmed epochs only, and may be behind the newest one: what that changed lies beside
the store. A thread of its own does this, beside the task that may be using the store. It is started
when the driver says that there are lookups.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import os
import weakref
from collections.abc import Iterator
from typing import Final

from recovery.local.store_directory import StoreDirectory
from snapshot.formats.delta_in_pieces import as_lists, iter_delta
from snapshot.protocol.messages import PROTOCOL
from statebackend.errors import StateBackendError
from statebackend.rpc.envelope import Call, encode
from statebackend.runtime.lookup_messages import (
    LOOKUP,
    Answer,
    LookupPoll,
    Question,
    decode_questions,
)
from statebackend.runtime.worker.participant import JobSubtask, RemoteSession
from statebackend.system import SYSTEM, System

__all__ = ["OPEN_STORES", "OpenStores", "answer_lookups", "entries_in"]

_log = logging.getLogger("statebackend.task")
_TIMEOUT_S: Final = 15.0
_TRIES: Final = 3
_RETRY_S: Final = 0.5
_ANSWER_BYTES: Final = 16 << 20  # what is more is read elsewhere
_POLL_BYTES: Final = 32 << 20  # of all answers that go together: a call has a limit

_Place = tuple[str, str, tuple[int, int]]


class OpenStores:
    """The store directories that this process has opened, by job, operator and key groups."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[_Place, StoreDirectory] = (
            weakref.WeakValueDictionary()
        )

    def note(self, local_name: str, operator: str, held: StoreDirectory) -> None:
        """A store was opened."""
        marker = held.store.marker() if held.store is not None else None
        if marker is not None:
            groups = marker.key_group_start, marker.key_group_end
            self._known[local_name, operator, groups] = held

    def count(self) -> int:
        """How many there are, in use or not."""
        return sum(held.store is not None for held in list(self._known.values()))

    def get(self, question: Question) -> StoreDirectory | None:
        """The one that a question is for."""
        return self._known.get((question.local_name, question.operator, question.key_groups))


OPEN_STORES: Final = OpenStores()
_answering: set[tuple[int, str]] = set()  # by process and session
_starting: Final = SYSTEM.threads.lock()


def answer_lookups(session: RemoteSession, who: JobSubtask, system: System = SYSTEM) -> None:
    """Have this process answer a session's lookups from now on; once is enough."""
    key = os.getpid(), session.endpoint.session
    with _starting:
        if key in _answering:
            return
        _answering.add(key)

    def run() -> None:
        try:
            # Containers may have one host name, and equal process ids.
            worker = f"{system.host_name()}-{os.getpid()}-{system.new_id()}"
            _answer(session, who.job, worker, system)
        except StateBackendError as error:  # the run is over, or the driver is gone
            _log.debug("no more lookups: %s", error)
        finally:
            _answering.discard(key)  # the next begin starts it again

    system.threads.start(run, "statebackend-lookups")


def _answer(session: RemoteSession, job: str, worker: str, system: System) -> None:
    answers: list[Answer] = []
    while True:
        request = Call(
            protocol=PROTOCOL,
            job=job,
            session=session.endpoint.session,
            kind=LOOKUP,
            body=encode(LookupPoll(worker, answers)),
        )
        body = session.client.call(session.endpoint, request, timeout_s=_TIMEOUT_S)
        answers, left_bytes = [], _POLL_BYTES
        for question in decode_questions(body):
            found = None
            held = OPEN_STORES.get(question)
            if held is not None:
                with contextlib.suppress(StateBackendError):  # it is read elsewhere
                    found = entries_in(held, question, system, min(left_bytes, _ANSWER_BYTES))
            keys, values = found or ([], [])
            left_bytes -= _size_of(keys, values)
            answers.append(Answer(question.id, found is not None, keys, values))


def _size_of(keys: list[bytes], values: list[bytes]) -> int:
    return sum(map(len, keys)) + sum(map(len, values))


def entries_in(
    held: StoreDirectory,
    question: Question,
    system: System = SYSTEM,
    limit_bytes: int = _ANSWER_BYTES,
) -> tuple[list[bytes], list[bytes]] | None:
    """The entries of a store after the epoch that a question names; None: it cannot say.

    Args:
        limit_bytes: what is larger is not said either.

    Raises:
        LocalCopyError, CorruptionError: what is here does not read.
    """
    for tries_left in reversed(range(_TRIES)):
        with held.reading() as store:
            before = store.marker() if store is not None else None
            if store is None or before is None:
                return None
            known = question.chains.get(before.epoch) == before.chain
            if known and not before.applying:
                found = dict[bytes, bytes]()
                size_bytes = 0
                for keys, values in store.scan_ranges(question.ranges):
                    size_bytes += _size_of(keys, values)
                    if size_bytes > limit_bytes:
                        return None
                    found.update(zip(keys, values, strict=True))
                for epoch in range(before.epoch + 1, question.epoch + 1):
                    _lay_over(found, held, epoch, question)
                if store.marker() == before:
                    ordered = sorted(found)
                    return ordered, [found[key] for key in ordered]
        if tries_left:  # an epoch is being written to it
            system.sleep_s(_RETRY_S / 10)
    return None


def _lay_over(
    found: dict[bytes, bytes], held: StoreDirectory, epoch: int, question: Question
) -> None:
    """What an epoch changed in the ranges.

    Raises:
        LocalDeltaError, CorruptionError: it is not here, or damaged.
    """
    digest = question.deltas.get(epoch, "")
    for key, value in _changes(held, epoch, digest, question.ranges):
        if value is None:
            found.pop(key, None)
        else:
            found[key] = value


def _changes(
    held: StoreDirectory, epoch: int, digest: str, ranges: list[tuple[bytes, bytes]]
) -> Iterator[tuple[bytes, bytes | None]]:
    recent = held.recent
    if recent is not None and (recent.epoch, recent.digest) == (epoch, digest):
        pieces = iter([(list(recent.keys), list(recent.values))])
    else:
        data = held.read_delta(epoch, digest)
        rows = iter_delta(data, digest=bytes.fromhex(digest), name=f"{epoch}-{digest}")
        pieces = as_lists(rows)
    for keys, values in pieces:  # in key order
        for start, end in ranges:
            first = bisect.bisect_left(keys, start)
            for n in range(first, bisect.bisect_left(keys, end, first)):
                yield keys[n], values[n]
