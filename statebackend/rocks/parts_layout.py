"""Which part of a parted store holds which key groups: a small file beside its parts.

It is written once, when the store is put together, and belongs to the store's files: a base names
it as it names table files. It may come from an object store, so that it is checked like a format.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import le
from typing import Final

import msgspec
from blake3 import blake3

from statebackend.errors import LocalCopyError
from statebackend.rocks.clipping import LAST_GROUP, GroupRange, group_key
from statebackend.rocks.rocksdb_reads import META_PREFIX

__all__ = [
    "LAYOUT_FILE",
    "Layout",
    "Routes",
    "decode_layout",
    "encode_layout",
    "read_layout",
    "write_layout",
]

LAYOUT_FILE: Final = "PARTS"
_FORMAT: Final = 1
_PART: Final = re.compile(r"p[0-9]{1,4}")
_LIMIT_BYTES: Final = 1 << 20


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The parts' folders, and who has what.

    ``routes``: pairs of a key group and the number of the part that holds the groups from there up
    to the next pair's. They ascend, and begin at 0: every key has one place.
    """

    format: int = _FORMAT
    parts: list[str]
    routes: list[tuple[int, int]]

    def ranges_of(self, part: int, first_group: int, last_group: int) -> tuple[GroupRange, ...]:
        """What a part holds of these key groups."""
        found: list[GroupRange] = []
        ends = [group - 1 for group, _ in self.routes[1:]]
        for (start, owner), end in zip(self.routes, [*ends, LAST_GROUP], strict=True):
            first, last = max(start, first_group), min(end, last_group)
            if owner == part and first <= last:
                found.append((first, last))
        return tuple(found)


def encode_layout(layout: Layout) -> bytes:
    """The layout as a file has it: JSON, and its digest in a line of its own.

    A route that is another by one bit would lead to a part that lacks the keys, without an error.
    """
    return _signed(msgspec.json.encode(layout))


def _signed(text: bytes) -> bytes:
    return text + b"\n" + blake3(text).hexdigest().encode()


def decode_layout(data: bytes, path: str) -> Layout:
    """The layout that a file holds.

    Raises:
        LocalCopyError: it is none; ``path`` says which.
    """
    text = data.partition(b"\n")[0]
    if _signed(text) != data:
        raise _damaged(path, "it is not what its digest says")
    try:
        layout = msgspec.json.decode(text, type=Layout)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if layout.format > _FORMAT:
        raise _damaged(path, f"it has the format version {layout.format}")
    names, groups = layout.parts, [group for group, _ in layout.routes]
    if not names or len(set(names)) != len(names) or not all(map(_PART.fullmatch, names)):
        raise _damaged(path, f"it names the parts {names[:8]}")
    if not groups or groups[0] or groups[-1] > LAST_GROUP or sorted(set(groups)) != groups:
        raise _damaged(path, f"its key groups are {groups[:8]}")
    if not all(0 <= part < len(names) for _, part in layout.routes):
        raise _damaged(path, "it names a part that it does not have")
    return layout


def write_layout(folder: str, layout: Layout) -> None:
    """Into the store's folder."""
    with open(os.path.join(folder, LAYOUT_FILE), "wb") as file:
        file.write(encode_layout(layout))


def read_layout(folder: str) -> Layout | None:
    """The layout of a store in parts; None for a store that is one database.

    Raises:
        LocalCopyError: it is none.
    """
    path = os.path.join(folder, LAYOUT_FILE)
    try:
        with open(path, "rb") as file:
            data = file.read(_LIMIT_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _damaged(path, str(error)) from error
    return decode_layout(data, path)


def _damaged(path: str, reason: str) -> LocalCopyError:
    return LocalCopyError(
        f"The layout of a local store, {path}, does not read ({reason}).",
        todo="The store is set aside and the state is restored from the next good copy.",
    )


class Routes:
    """From keys to places, as :attr:`Layout.routes` says.

    A place is the number of a route: several may lead to one part.
    """

    def __init__(self, routes: Sequence[tuple[int, int]]) -> None:
        self.parts = [part for _, part in routes]
        self.bounds = [group_key(group) for group, _ in routes[1:]]

    def place(self, key: bytes) -> int:
        """The place of a key."""
        return bisect_right(self.bounds, key)

    def ends(self, place: int) -> tuple[bytes, bytes]:
        """The keys of a place: from the first one to below the second."""
        start = self.bounds[place - 1] if place else b""
        return start, self.bounds[place] if place < len(self.bounds) else META_PREFIX

    def cut(self, keys: Sequence[bytes]) -> Iterator[tuple[int, int, int]]:
        """Ascending keys by their places: the place, and which of the keys."""
        start = 0
        while start < len(keys):
            place = self.place(keys[start])
            last = place == len(self.bounds)
            end = len(keys) if last else bisect_left(keys, self.bounds[place], start)
            yield place, start, end
            start = end

    def shares(self, keys: Sequence[bytes]) -> dict[int, list[int] | slice]:
        """Which of the keys, in their order, each part has; quickest where they ascend."""
        found: dict[int, list[int] | slice] = {}
        if not all(map(le, keys, islice(keys, 1, None))):
            for at, key in enumerate(keys):
                found.setdefault(self.parts[self.place(key)], []).append(at)  # type: ignore[union-attr]
            return found
        for place, start, end in self.cut(keys):
            part = self.parts[place]
            before = found.get(part)
            if before is None:
                found[part] = slice(start, end)
            else:  # it has several ranges of key groups
                places = before if isinstance(before, list) else list(range(len(keys)))[before]
                found[part] = [*places, *range(start, end)]
        return found
