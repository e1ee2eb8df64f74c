"""A store in this process's memory, for tests and simulations.

Durable only in the sense that it outlives the driver object that wrote to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from snapshot.storage.object_store import (
    Buffer,
    Capabilities,
    CreateOutcome,
    Listing,
    ObjectInfo,
    ObjectStore,
    byte_views,
    check_name,
    check_prefix,
    check_range,
    checked_names,
)
from statebackend.errors import ObjectNotFoundError

__all__ = ["MemoryStore"]


class _Kept(NamedTuple):
    body: bytes
    modified_ms: int | None


class MemoryStore(ObjectStore):
    """Objects in a dict behind one lock; safe to share between threads."""

    def __init__(
        self, name: str = "test", *, clock_ms: Callable[[], int | None] = lambda: None
    ) -> None:
        """An empty store.

        Args:
            name: for the URI.
            clock_ms: what listings say of an object is this clock's time when it was written.
        """
        self._uri = f"memory://{name}"
        self._clock_ms = clock_ms
        self._objects: dict[str, _Kept] = {}
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        """`memory://name`."""
        return self._uri

    @property
    def capabilities(self) -> Capabilities:
        """Everything but constant memory."""
        return Capabilities(
            create_if_absent=True,
            ranged_read=True,
            streamed=False,
            reason="every object is in memory as a whole",
        )

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """Keep a copy of the bytes."""
        check_name(name)
        body = b"".join(byte_views(parts))
        with self._lock:
            self._objects[name] = _Kept(body, self._clock_ms())

    def create(self, name: str, parts: Sequence[Buffer]) -> CreateOutcome:
        """Keep a copy of the bytes if the name is free."""
        check_name(name)
        body = b"".join(byte_views(parts))
        with self._lock:
            if name in self._objects:
                return CreateOutcome.EXISTS
            self._objects[name] = _Kept(body, self._clock_ms())
            return CreateOutcome.CREATED

    def get(self, name: str) -> bytes:
        """The whole object."""
        check_name(name)
        with self._lock:
            kept = self._objects.get(name)
        if kept is None:
            raise ObjectNotFoundError(f"There is no object {name!r} in {self._uri}.")
        return kept.body

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """A slice of the object."""
        check_range(start, length)
        return self.get(name)[start : start + length]

    def get_tail(self, name: str, length: int) -> tuple[bytes, int]:
        """The end of the object and its size."""
        check_range(0, length)
        body = self.get(name)
        return body[-length:], len(body)

    def list(self, prefix: str) -> Listing:
        """Objects by name."""
        check_prefix(prefix)
        with self._lock:
            return sorted(
                ObjectInfo(name, len(kept.body), kept.modified_ms)
                for name, kept in self._objects.items()
                if name.startswith(prefix)
            )

    def delete(self, names: Iterable[str]) -> None:
        """Forget objects."""
        wanted = checked_names(names)
        with self._lock:
            for name in wanted:
                self._objects.pop(name, None)
