"""A store that counts what goes through it: what a checkpoint costs, in requests and bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from snapshot.storage.object_store import ObjectStore
from snapshot.storage.passing import PassingStore

__all__ = ["CountingStore", "VerbCount"]

Result = TypeVar("Result")


@dataclass(frozen=True)
class VerbCount:
    """Requests made with one verb, failed ones included, and the payload bytes they moved.

    Written bytes count when they are sent, whatever the answer; read bytes when they arrive.
    """

    requests: int = 0
    size_bytes: int = 0


class CountingStore(PassingStore):
    """Passes every call on to `inner` and counts it. Thread-safe."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._counts: dict[str, VerbCount] = {}

    @property
    def counts(self) -> dict[str, VerbCount]:
        """A copy of the counts so far, by verb (`put`, `create`, `get`, ...); unused verbs absent.

        One request per call: for `delete`, as the stores that delete in bulk charge for it, for
        `put_file` and for `get_chunks` too.
        """
        with self._lock:
            return dict(self._counts)

    def _around(
        self,
        verb: str,
        name: str,
        sent_bytes: int,
        call: Callable[[], Result],
        received_bytes: Callable[[Result], int],
    ) -> Result:
        self._add(verb, requests=1, size_bytes=sent_bytes)
        found = call()
        self._add(verb, size_bytes=received_bytes(found))
        return found

    def _stream(self, name: str, start: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
        self._add("get_chunks", requests=1)
        for chunk in start():
            self._add("get_chunks", size_bytes=len(chunk))
            yield chunk

    def _add(self, verb: str, *, requests: int = 0, size_bytes: int = 0) -> None:
        with self._lock:
            old = self._counts.get(verb, VerbCount())
            self._counts[verb] = VerbCount(old.requests + requests, old.size_bytes + size_bytes)
