"""Where lookups wait for a worker that has the store open."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from statebackend.errors import ProtocolError, StaleRequestError
from statebackend.rpc.envelope import encode
from statebackend.runtime.lookup_messages import LOOKUP, Answer, Question, decode_poll
from statebackend.system import SYSTEM, System

__all__ = ["LookupDesk"]

_WAIT_S: Final = 5.0  # how long a worker waits for a question
_GONE_S: Final = 2.0 * _WAIT_S  # a worker that has not asked for so long is no more


class _Waiting:
    """A question on its way."""

    def __init__(self, workers: set[str]) -> None:
        self.asked = workers
        self.answer: Answer | None = None


def _settled(waiting: Iterable[_Waiting]) -> bool:
    """Whether all are answered, or one cannot be."""
    found = [(one.answer is not None, bool(one.asked)) for one in waiting]
    return all(answered for answered, _ in found) or (False, False) in found


class LookupDesk:
    """Hands questions to the workers of a run; the one that has the store open answers.

    Attributes:
        wanted: whether workers are to ask. It becomes so with the first lookup.
    """

    def __init__(self, system: System = SYSTEM) -> None:
        self._system = system
        self._changed = system.threads.condition()
        self._ids = itertools.count()
        self._queues: dict[str, list[Question]] = {}
        self._seen_s: dict[str, float] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._closed = False
        self.wanted = False

    def ask(self, questions: Sequence[Question], timeout_s: float) -> list[Answer] | None:
        """What the workers answer that have the stores open, to all questions at once.

        Returns:
            the answers in the questions' order; None: one is open nowhere, or not all came in time.
        """
        with self._changed:
            self.wanted = True
            if self._closed:
                return None
            now_s = self._system.monotonic_s()
            for worker in [w for w, at_s in self._seen_s.items() if now_s - at_s > _GONE_S]:
                del self._seen_s[worker], self._queues[worker]
            asked = {next(self._ids): one for one in questions}
            waiting = {number: _Waiting(set(self._queues)) for number in asked}
            self._waiting.update(waiting)
            numbered = [msgspec.structs.replace(one, id=number) for number, one in asked.items()]
            for queue in self._queues.values():
                queue += numbered
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or _settled(waiting.values()), timeout_s)
            for number in waiting:
                del self._waiting[number]
            for queue in self._queues.values():
                queue[:] = [one for one in queue if one.id not in waiting]
            answers = [one.answer for one in waiting.values() if one.answer is not None]
            return answers if len(answers) == len(waiting) else None

    def call(self, kind: str, body: bytes) -> bytes:
        """A worker's call: its answers are taken, and questions given, if need be after a while.

        Raises:
            ProtocolError: it is nothing of the kind. StaleRequestError: the run has ended.
        """
        if kind != LOOKUP:
            raise ProtocolError(f"The driver knows no {kind!r}.")
        poll = decode_poll(body)
        with self._changed:
            for answer in poll.answers:
                self._take(poll.worker, answer)
            self._refuse_if_closed()
            self._seen_s[poll.worker] = self._system.monotonic_s()
            queue = self._queues.setdefault(poll.worker, [])
            self._changed.notify_all()
            self._changed.wait_for(lambda: queue or self._closed, _WAIT_S)
            self._refuse_if_closed()
            self._seen_s[poll.worker] = self._system.monotonic_s()
            questions, queue[:] = list(queue), []
        return encode(questions)

    def _refuse_if_closed(self) -> None:
        """End who asks: answered at once, it would ask again and again."""
        if self._closed:
            raise StaleRequestError("The run has ended.", todo="Nothing to do.")

    def _take(self, worker: str, answer: Answer) -> None:
        waiting = self._waiting.get(answer.id)
        if waiting is not None:
            waiting.asked.discard(worker)
            if answer.held:
                waiting.answer = answer

    def close(self) -> None:
        """Let go of who waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
