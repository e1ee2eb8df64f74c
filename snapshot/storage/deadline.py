"""Many calls with one deadline: done by then, or given up with a word on what took so long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from snapshot.storage.object_store import ObjectStore
from snapshot.storage.passing_store import PassingStore
from statebackend.errors import CommitUnknownError, StoreUnreachableError

__all__ = ["Deadline", "DeadlineStore"]

Result = TypeVar("Result")


class Deadline:
    """A moment by which something is to be done, and what it is busy with. Thread-safe.

    Nothing is interrupted: it is looked at the clock before each step, and a step that may last is
    told how long (see :meth:`ObjectStore.limited`).

    Args:
        what: is to be done, as a sentence begins with it.
    """

    def __init__(self, what: str, timeout_s: float, *, now_s: Callable[[], float]) -> None:
        self._what, self._timeout_s, self._now_s = what, timeout_s, now_s
        self._until_s = self._allowed_until_s = now_s() + timeout_s
        self._lock = threading.Lock()
        self._running: dict[object, tuple[float, str]] = {}
        self._last = ("", 0.0)
        self._said = ""

    @property
    def left_s(self) -> float:
        """Seconds; none or less once it has passed."""
        return self._allowed_until_s - self._now_s()

    @property
    def passed(self) -> bool:
        """Whether it is too late, but for cleaning up."""
        return self._now_s() >= self._until_s

    def check(self) -> None:
        """Raise :meth:`error` once it has passed."""
        if self.left_s <= 0:
            raise self.error()

    def error(self) -> StoreUnreachableError:
        """What is said when it has passed, with the step that took longest when it was found."""
        with self._lock:
            now_s = self._now_s()
            busy = [(text, now_s - since_s) for since_s, text in self._running.values()]
            text, seconds = max([*busy, self._last], key=lambda one: one[1])
            doing = f": it was {text} for {seconds:.1f} s" if text else ""
            self._said = self._said or (
                f"{self._what} was not finished after {self._timeout_s:g} s{doing}."
            )
            return StoreUnreachableError(
                self._said,
                todo="Give it more time (timeout_s=), or find out why that takes so long.",
            )

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Around all of it: what fails for want of time is told as :meth:`error`."""
        try:
            yield
        except (StoreUnreachableError, CommitUnknownError) as error:
            if not self.passed:
                raise
            raise self.error() from error

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Inside, it is busy with this: a form in -ing. Raises as :meth:`check`, before."""
        self.check()
        one, since_s = object(), self._now_s()
        with self._lock:
            self._running[one] = since_s, text
        try:
            with self.telling():
                yield
        finally:
            with self._lock:
                del self._running[one]
                self._last = text, self._now_s() - since_s

    @contextmanager
    def cleaning(self, grace_s: float) -> Iterator[None]:
        """Inside there are so many seconds at least: to leave nothing behind."""
        before_s = self._allowed_until_s
        self._allowed_until_s = max(before_s, self._now_s() + grace_s)
        try:
            yield
        finally:
            self._allowed_until_s = before_s


class DeadlineStore(PassingStore):
    """Gives each call to `inner` what is left, and begins none when nothing is."""

    def __init__(self, inner: ObjectStore, deadline: Deadline) -> None:
        super().__init__(inner)
        self._deadline = deadline

    def _around(
        self,
        verb: str,
        name: str,
        sent_bytes: int,
        call: Callable[[], Result],
        received_bytes: Callable[[Result], int],
    ) -> Result:
        with self._busy(verb, name):
            return call()

    def _stream(self, name: str, start: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
        pieces = start()
        while True:
            with self._busy("get_chunks", name):
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    @contextmanager
    def _busy(self, verb: str, name: str) -> Iterator[None]:
        what = f"waiting for the {verb} of {name!r} in {self.uri}"
        with self._deadline.doing(what), self._inner.limited(max(self._deadline.left_s, 0.0)):
            yield
