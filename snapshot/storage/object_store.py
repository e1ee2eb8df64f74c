"""What an object store is: whole objects under names, and one conditional write.

Everything that correctness rests on is said here once; `snapshot.storage.testing.StoreTests` checks
it for every store. Stores are safe to use from many threads. They do not pickle: ship the URI and
open the store where it is used.
"""

from __future__ import annotations

import enum
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

from snapshot.storage.files_to_upload import file_chunks
from statebackend.errors import SettingError

__all__ = [
    "CHUNK_BYTES",
    "Buffer",
    "Capabilities",
    "CreateOutcome",
    "Listing",
    "ObjectInfo",
    "ObjectStore",
    "byte_views",
    "check_chunk",
    "check_name",
    "check_prefix",
    "check_range",
    "checked_names",
    "is_name",
    "sliced",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

CHUNK_BYTES = 8 << 20
NAME_LIMIT_BYTES = 1024  # S3's limit on a key
PART_LIMIT_BYTES = 255  # NAME_MAX of the usual file systems


class CreateOutcome(enum.Enum):
    """What a create-if-absent answered. An answer that never came is an error, not an outcome."""

    CREATED = "created"
    EXISTS = "exists"


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a store can do.

    Attributes:
        create_if_absent: `create` is atomic against every other writer of the same place.
        ranged_read: `get_range` and `get_tail` cost one request and move only what is asked for.
        atomic_put: a reader sees the old object or the new one while `put` is under way. Where this
            is missing, only digests (which readers check anyway) tell a torn object from a whole.
        streamed: `put_file` and `get_chunks` need memory for some chunks, whatever the size.
        reason: why something above is missing; empty if nothing is.
    """

    create_if_absent: bool
    ranged_read: bool
    atomic_put: bool = True
    streamed: bool = True
    reason: str = ""


@dataclass(frozen=True, order=True)
class ObjectInfo:
    """One object of a listing; compares and sorts by name and size.

    Attributes:
        name: without the store's own prefix.
        size_bytes: of the whole object.
        modified_ms: when it was last written, in milliseconds since 1970 by the store's clock
            (often cut to seconds); None if the store does not say.
    """

    name: str
    size_bytes: int
    modified_ms: int | None = field(default=None, compare=False)


# Inside the class below `list` is a method, so the built-in type needs another name there.
Listing: TypeAlias = list[ObjectInfo]


class ObjectStore(ABC):
    """Whole objects under names.

    Every method raises `SettingError` for a malformed name, `StoreUnreachableError` for a failure
    that may pass or a place that cannot be reached or written, and `ObjectNotFoundError` only where
    the store has said that the object is absent: a failure is never reported as an absence.
    A reader sees a whole object or none, and a write that has returned is seen by every later read
    and listing.
    """

    @property
    @abstractmethod
    def uri(self) -> str:
        """Where the store is, in the form that `open_store` takes; named in every error."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What the store claims to be able to do; `probe` checks it."""

    @abstractmethod
    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """Write one object whose bytes are `parts` one after the other.

        Durable on return. An object of that name is replaced as a whole: callers use names that
        are unique by construction, so a repetition carries the same bytes.
        """

    def put_file(self, name: str, path: str | os.PathLike[str]) -> None:
        """Write one object from a local file that nobody changes meanwhile; otherwise as `put`.

        Raises:
            LocalCopyError: the file is not there, cannot be read, or changed its size.
        """
        self.put(name, list(file_chunks(path, CHUNK_BYTES)))

    @abstractmethod
    def create(self, name: str, parts: Sequence[Buffer]) -> CreateOutcome:
        """Write one object if there is none of that name; of all racing callers one gets CREATED.

        Durable before CREATED is returned. `StoreUnreachableError` means that the outcome is not
        known: the object may be there, may not be, or may still arrive.
        """

    @abstractmethod
    def get(self, name: str) -> bytes:
        """The whole object. Raises `ObjectNotFoundError`."""

    def get_chunks(self, name: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """The object from its start in pieces of `chunk_bytes`; the last one may be shorter.

        Nothing for an empty object. All pieces are of one version of the object: if it is replaced
        meanwhile and the old version is gone, `StoreUnreachableError`. What was handed out before
        an error was right. Digests are for the caller to check.

        Raises `ObjectNotFoundError` with the first piece at the latest.
        """
        check_chunk(chunk_bytes)
        return sliced(self.get(name), chunk_bytes)

    @abstractmethod
    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Up to `length` (at least 1) bytes from `start`; fewer, or none, where the object ends.

        Raises `ObjectNotFoundError`.
        """

    @abstractmethod
    def get_tail(self, name: str, length: int) -> tuple[bytes, int]:
        """The last `length` (at least 1) bytes, or all if there are fewer, and the object's size.

        Both are of one and the same version of the object. Raises `ObjectNotFoundError`.
        """

    @abstractmethod
    def list(self, prefix: str) -> Listing:
        """Every object whose name starts with `prefix` (a plain string prefix), by name.

        Names compare by code point. Nothing under the prefix is an empty list.
        """

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; an absent one is fine.

        Need not be durable: after a crash a deleted object may be back, so nothing may rest on its
        absence.
        """

    def limited(self, deadline_s: float) -> AbstractContextManager[None]:
        """Calls of this thread inside give up after so many seconds, where they would go on.

        For stores that try again by themselves; the others do nothing. It never lengthens.
        """
        return nullcontext()

    def take_retries(self) -> int:
        """How many calls were tried again since this was asked last, by whoever asked."""
        return 0

    def __reduce__(self) -> NoReturn:
        raise SettingError(
            f"The object store {self.uri} cannot be pickled: it holds open resources and locks.",
            todo="Ship its URI and call open_store(uri, new_id=...) where it is used.",
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"


def _part_fault(part: str) -> str:
    if part == "":
        return "it has an empty part (a leading, trailing or double '/')"
    if part.startswith("."):
        return f"its part {part!r} starts with '.' (that also rules out '.' and '..')"
    if len(part.encode("utf-8", "surrogatepass")) > PART_LIMIT_BYTES:
        return f"a part of it is over {PART_LIMIT_BYTES} bytes"
    return ""


def _name_fault(name: str) -> str:
    if not name:
        return "it is empty"
    if not name.isprintable() or "\\" in name:  # lone surrogates are not printable either
        return "it holds a backslash or a character that does not print"
    if len(name.encode("utf-8")) > NAME_LIMIT_BYTES:
        return f"it is over {NAME_LIMIT_BYTES} bytes"
    return next(filter(None, map(_part_fault, name.split("/"))), "")


def check_name(name: str) -> None:
    """Refuse a name that is not the same object in every store.

    A name is parts joined by '/', none of them empty or starting with '.'.

    Raises:
        SettingError: what is wrong with it.
    """
    fault = _name_fault(name)
    if fault:
        raise SettingError(
            f"The object name {name[:80]!r} is refused: {fault}.",
            todo="Use relative names such as 'data/0123'.",
        )


def is_name(name: str) -> bool:
    """Whether `check_name` would let it pass: what a listing shows of what others put there."""
    return not _name_fault(name)


def check_prefix(prefix: str) -> None:
    """Refuse a listing prefix that no name could start with. Raises `SettingError`."""
    folders, _, _ = prefix.rpartition("/")
    if prefix and (prefix.startswith("/") or (folders and _name_fault(folders))):
        raise SettingError(
            f"The listing prefix {prefix[:80]!r} is refused: no object's name can start with it.",
            todo="Use '' or a prefix such as 'log/'.",
        )


def check_range(start: int, length: int) -> None:
    """Refuse a range that stores would not agree on. Raises `SettingError`."""
    if start < 0 or length < 1:
        raise SettingError(
            f"The range of {length} bytes from {start} is refused.",
            todo="Ask for at least one byte, from position 0 or later.",
        )


def check_chunk(chunk_bytes: int) -> None:
    """Refuse pieces of no bytes. Raises `SettingError`."""
    if chunk_bytes < 1:
        raise SettingError(
            f"Pieces of {chunk_bytes} bytes are refused.", todo="Ask for at least one byte each."
        )


def sliced(body: bytes, chunk_bytes: int) -> Iterator[bytes]:
    """A body in pieces."""
    return (body[start : start + chunk_bytes] for start in range(0, len(body), chunk_bytes))


def byte_views(parts: Sequence[Buffer]) -> Sequence[memoryview]:
    """The parts as flat views of bytes, nothing copied."""
    return [memoryview(part).cast("B") for part in parts]


def checked_names(names: Iterable[str]) -> tuple[str, ...]:
    """The names, all checked before anything is done with the first."""
    wanted = tuple(names)
    for name in wanted:
        check_name(name)
    return wanted
