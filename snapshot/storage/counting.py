"""A store that counts what goes through it: what a checkpoint costs, in requests and bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from snapshot.storage.base import (
    Buffer,
    Capabilities,
    CreateOutcome,
    Listing,
    ObjectStore,
    byte_views,
)

__all__ = ["CountingStore", "VerbCount"]


@dataclass(frozen=True)
class VerbCount:
    """Requests made with one verb, failed ones included, and the payload bytes they moved.

    Written bytes count when they are sent, whatever the answer; read bytes when they arrive.
    """

    requests: int = 0
    size_bytes: int = 0


class CountingStore(ObjectStore):
    """Passes every call on to `inner` and counts it. Thread-safe."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._counts: dict[str, VerbCount] = {}

    @property
    def uri(self) -> str:
        """The inner store's."""
        return self._inner.uri

    @property
    def capabilities(self) -> Capabilities:
        """The inner store's."""
        return self._inner.capabilities

    @property
    def counts(self) -> dict[str, VerbCount]:
        """A copy of the counts so far, by verb (`put`, `create`, `get`, ...); unused verbs absent.

        `delete` counts one request per call, as the stores that delete in bulk charge for it.
        """
        with self._lock:
            return dict(self._counts)

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """Count a `put`."""
        self._add("put", requests=1, size_bytes=_size_bytes(parts))
        self._inner.put(name, parts)

    def create(self, name: str, parts: Sequence[Buffer]) -> CreateOutcome:
        """Count a `create`."""
        self._add("create", requests=1, size_bytes=_size_bytes(parts))
        return self._inner.create(name, parts)

    def get(self, name: str) -> bytes:
        """Count a `get`."""
        self._add("get", requests=1)
        body = self._inner.get(name)
        self._add("get", size_bytes=len(body))
        return body

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Count a `get_range`."""
        self._add("get_range", requests=1)
        body = self._inner.get_range(name, start, length)
        self._add("get_range", size_bytes=len(body))
        return body

    def get_tail(self, name: str, length: int) -> tuple[bytes, int]:
        """Count a `get_tail`."""
        self._add("get_tail", requests=1)
        body, total_bytes = self._inner.get_tail(name, length)
        self._add("get_tail", size_bytes=len(body))
        return body, total_bytes

    def list(self, prefix: str) -> Listing:
        """Count a `list`."""
        self._add("list", requests=1)
        return self._inner.list(prefix)

    def delete(self, names: Iterable[str]) -> None:
        """Count a `delete`."""
        self._add("delete", requests=1)
        self._inner.delete(names)

    def _add(self, verb: str, *, requests: int = 0, size_bytes: int = 0) -> None:
        with self._lock:
            old = self._counts.get(verb, VerbCount())
            self._counts[verb] = VerbCount(old.requests + requests, old.size_bytes + size_bytes)


def _size_bytes(parts: Sequence[Buffer]) -> int:
    return sum(view.nbytes for view in byte_views(parts))
