"""What the decorators of stores share: every call goes through one place."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from snapshot.storage.object_store import (
    CHUNK_BYTES,
    Buffer,
    Capabilities,
    CreateOutcome,
    Listing,
    ObjectStore,
    byte_views,
    check_chunk,
    check_name,
    checked_names,
)

__all__ = ["PassingStore"]

Result = TypeVar("Result")


class PassingStore(ObjectStore):
    """Passes every call on to `inner`, around which a subclass does what it is for."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner

    @property
    def uri(self) -> str:
        """The inner store's."""
        return self._inner.uri

    @property
    def capabilities(self) -> Capabilities:
        """The inner store's."""
        return self._inner.capabilities

    def limited(self, deadline_s: float) -> AbstractContextManager[None]:
        """The inner store's."""
        return self._inner.limited(deadline_s)

    def take_retries(self) -> int:
        """The inner store's."""
        return self._inner.take_retries()

    @abstractmethod
    def _around(
        self,
        verb: str,
        name: str,
        sent_bytes: int,
        call: Callable[[], Result],
        received_bytes: Callable[[Result], int],
    ) -> Result:
        """Make one call.

        Args:
            verb: the method's name.
            name: of the object; the prefix of a listing; the first name of a deletion.
            sent_bytes: payload that goes out.
            call: calls the inner store.
            received_bytes: payload in what `call` returned.
        """

    @abstractmethod
    def _stream(self, name: str, start: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
        """Pass on the pieces of a `get_chunks`, which `start` begins; it may be a generator."""

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """Pass on."""
        size_bytes = _size_bytes(parts)
        self._around("put", name, size_bytes, lambda: self._inner.put(name, parts), _nothing)

    def put_file(self, name: str, path: str | os.PathLike[str]) -> None:
        """Pass on."""
        size_bytes = _file_bytes(path)
        self._around(
            "put_file", name, size_bytes, lambda: self._inner.put_file(name, path), _nothing
        )

    def create(self, name: str, parts: Sequence[Buffer]) -> CreateOutcome:
        """Pass on."""
        size_bytes = _size_bytes(parts)
        return self._around(
            "create", name, size_bytes, lambda: self._inner.create(name, parts), _nothing
        )

    def get(self, name: str) -> bytes:
        """Pass on."""
        return self._around("get", name, 0, lambda: self._inner.get(name), len)

    def get_chunks(self, name: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Pass on; nothing is asked for before the first piece is taken."""
        check_name(name)
        check_chunk(chunk_bytes)
        return self._stream(name, lambda: self._inner.get_chunks(name, chunk_bytes))

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Pass on."""
        return self._around(
            "get_range", name, 0, lambda: self._inner.get_range(name, start, length), len
        )

    def get_tail(self, name: str, length: int) -> tuple[bytes, int]:
        """Pass on."""
        return self._around(
            "get_tail",
            name,
            0,
            lambda: self._inner.get_tail(name, length),
            lambda found: len(found[0]),
        )

    def list(self, prefix: str) -> Listing:
        """Pass on."""
        return self._around("list", prefix, 0, lambda: self._inner.list(prefix), _nothing)

    def delete(self, names: Iterable[str]) -> None:
        """Pass on."""
        wanted = checked_names(names)
        first = wanted[0] if wanted else ""
        self._around("delete", first, 0, lambda: self._inner.delete(wanted), _nothing)


def _nothing(_: object) -> int:
    return 0


def _size_bytes(parts: Sequence[Buffer]) -> int:
    return sum(view.nbytes for view in byte_views(parts))


def _file_bytes(path: str | os.PathLike[str]) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0  # the inner store says what is wrong with it
