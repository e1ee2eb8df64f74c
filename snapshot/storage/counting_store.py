"""A store that counts what goes through it: what a checkpoint costs, in requests and bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from snapshot.storage.object_store import ObjectStore
from snapshot.storage.passing_store import PassingStore
from statebackend.errors import ObjectNotFoundError, StoreUnreachableError

__all__ = ["CountingStore", "VerbCount"]

Result = TypeVar("Result")


@dataclass(frozen=True)
class VerbCount:
    """Requests made with one verb, failed ones included, and the payload bytes they moved.

    Written bytes count when they are sent, whatever the answer; read bytes when they arrive.
    ``errors``: of the requests, those that failed. That an object is not there is an answer.
    """

    requests: int = 0
    size_bytes: int = 0
    errors: int = 0


class CountingStore(PassingStore):
    """Passes every call on to `inner` and counts it. Thread-safe.

    Args:
        now_s: seconds that never go backwards.
    """

    def __init__(self, inner: ObjectStore, *, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._lock, self._now_s = threading.Lock(), now_s
        self._counts: dict[str, VerbCount] = {}
        self._retries = 0
        self._unreachable_since_s: float | None = None

    @property
    def counts(self) -> dict[str, VerbCount]:
        """A copy of the counts so far, by verb (`put`, `create`, `get`, ...); unused verbs absent.

        One request per call: for `delete`, as the stores that delete in bulk charge for it, for
        `put_file` and for `get_chunks` too.
        """
        with self._lock:
            return dict(self._counts)

    @property
    def retries(self) -> int:
        """How many calls to the store were tried again so far."""
        with self._lock:
            self._retries += self._inner.take_retries()
            return self._retries

    @property
    def unreachable_s(self) -> float:
        """For how long the store has not answered; 0 once a call has succeeded again.

        It counts from the beginning of the first call that failed.
        """
        with self._lock:
            since_s = self._unreachable_since_s
        return 0.0 if since_s is None else self._now_s() - since_s

    def _around(
        self,
        verb: str,
        name: str,
        sent_bytes: int,
        call: Callable[[], Result],
        received_bytes: Callable[[Result], int],
    ) -> Result:
        self._add(verb, requests=1, size_bytes=sent_bytes)
        with self._judged(verb):
            found = call()
        self._add(verb, size_bytes=received_bytes(found))
        return found

    def _stream(self, name: str, start: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
        self._add("get_chunks", requests=1)
        pieces = start()
        while True:
            with self._judged("get_chunks"):
                piece = next(pieces, None)
            if piece is None:
                return
            self._add("get_chunks", size_bytes=len(piece))
            yield piece

    @contextmanager
    def _judged(self, verb: str) -> Iterator[None]:
        """Around a call: note whether it failed, and whether the store can be reached."""
        began_s = self._now_s()
        try:
            yield
        except ObjectNotFoundError:
            self._unreachable_since_s = None
            raise
        except Exception as error:
            self._add(verb, errors=1)
            with self._lock:
                if isinstance(error, StoreUnreachableError) and self._unreachable_since_s is None:
                    self._unreachable_since_s = began_s
            raise
        self._unreachable_since_s = None

    def _add(self, verb: str, *, requests: int = 0, size_bytes: int = 0, errors: int = 0) -> None:
        with self._lock:
            old = self._counts.get(verb, VerbCount())
            self._counts[verb] = VerbCount(
                old.requests + requests, old.size_bytes + size_bytes, old.errors + errors
            )
