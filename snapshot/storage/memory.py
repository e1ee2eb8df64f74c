"""A store in this process's memory, for tests and simulations.

Durable only in the sense that it outlives the driver object that wrote to it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from snapshot.storage.base import (
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


class MemoryStore(ObjectStore):
    """Objects in a dict behind one lock; safe to share between threads."""

    def __init__(self, name: str = "test") -> None:
        self._uri = f"memory://{name}"
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        """`memory://name`."""
        return self._uri

    @property
    def capabilities(self) -> Capabilities:
        """Everything."""
        return Capabilities(create_if_absent=True, ranged_read=True)

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """Keep a copy of the bytes."""
        check_name(name)
        body = b"".join(byte_views(parts))
        with self._lock:
            self._objects[name] = body

    def create(self, name: str, parts: Sequence[Buffer]) -> CreateOutcome:
        """Keep a copy of the bytes if the name is free."""
        check_name(name)
        body = b"".join(byte_views(parts))
        with self._lock:
            if name in self._objects:
                return CreateOutcome.EXISTS
            self._objects[name] = body
            return CreateOutcome.CREATED

    def get(self, name: str) -> bytes:
        """The whole object."""
        check_name(name)
        with self._lock:
            body = self._objects.get(name)
        if body is None:
            raise ObjectNotFoundError(f"There is no object {name!r} in {self._uri}.")
        return body

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
                ObjectInfo(name, len(body))
                for name, body in self._objects.items()
                if name.startswith(prefix)
            )

    def delete(self, names: Iterable[str]) -> None:
        """Forget objects."""
        wanted = checked_names(names)
        with self._lock:
            for name in wanted:
                self._objects.pop(name, None)
