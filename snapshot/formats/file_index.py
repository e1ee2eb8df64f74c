"""The index of a large base: which of RocksDB's own files it has, under names of its incarnation.

What a record holds of such a base is its *index*: which files make up the store, and in which
object each of them lies. A file that the base before it had uploaded already is named again and not
sent again: within one incarnation (one directory, opened by one process after the other) RocksDB
never gives a file number twice, and never changes a table file. Across incarnations equal names
mean nothing (two restores of one checkpoint were seen to write different files of one name), so a
file is taken for the same only if this incarnation uploaded it, or was restored from it.

Format version 1: JSON (`FileIndex`) in one zstd frame. Its digest is in the record's manifest, the
digest of each file is in the index. Version 2 is the same, but files may lie in a folder of the
store's directory (one level): a store in parts has one for each. It is written for those only.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from snapshot.formats.zstd_frame import PackedError, pack, unpack
from statebackend.errors import CorruptionError, UnsupportedFormatError

__all__ = ["FileEntry", "FileIndex", "decode_index", "encode_index", "index_of", "reusable"]

FORMAT_VERSION: Final = 2
_FLAT_VERSION: Final = 1
INDEX_LIMIT_BYTES: Final = 64 << 20
# Written anew for every checkpoint, under a name that may stay the same.
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}")
_IN_FOLDER: Final = re.compile(r"(?:([a-z0-9]{1,16})/)?" + _NAME.pattern)
_CHANGING: Final = ("CURRENT", "MANIFEST-", "OPTIONS-")


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file: its name in the store's directory, the object with its bytes, and their digest.

    The name may begin with a folder: ``p0/000012.sst``.
    """

    name: str
    object: str
    size_bytes: int
    digest: str


class FileIndex(msgspec.Struct, frozen=True, kw_only=True):
    """All files of one base. ``incarnation``: of the local store that they were taken from."""

    format: int = _FLAT_VERSION
    incarnation: str
    files: list[FileEntry]

    @property
    def size_bytes(self) -> int:
        """What a restore from it reads."""
        return sum(file.size_bytes for file in self.files)


_decoder = msgspec.json.Decoder(FileIndex)


def index_of(incarnation: str, files: list[FileEntry]) -> FileIndex:
    """An index of the lowest format version that can hold these files."""
    flat = not any("/" in file.name for file in files)
    version = _FLAT_VERSION if flat else FORMAT_VERSION
    return FileIndex(format=version, incarnation=incarnation, files=files)


def encode_index(index: FileIndex) -> bytes:
    """The index as a record holds it."""
    return pack(msgspec.json.encode(index))


def decode_index(data: bytes, name: str = "") -> FileIndex:
    """Back from :func:`encode_index`; the caller has checked the digest.

    Raises:
        CorruptionError: it is none, or names a file outside the store's directory.
        UnsupportedFormatError: a later format.
    """
    try:
        index = _decoder.decode(unpack(data, INDEX_LIMIT_BYTES))
    except (PackedError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptionError(
            f"The file index {name!r} does not read ({error}).",
            todo="Restore it from another copy of the store.",
        ) from error
    if index.format > FORMAT_VERSION:
        raise UnsupportedFormatError(
            f"The file index {name!r} has the format version {index.format}; this release reads "
            f"up to {FORMAT_VERSION}.",
            todo="Use a release that is at least as new as the one that wrote it.",
        )
    allowed = _NAME if index.format == _FLAT_VERSION else _IN_FOLDER
    names = {file.name for file in index.files}
    folders: set[str | None] = set()
    for file in index.files:
        match = allowed.fullmatch(file.name)
        if match is None or file.size_bytes < 0:
            raise CorruptionError(
                f"The file index {name!r} names the file {file.name!r} of {file.size_bytes} bytes, "
                "which is no store's.",
                todo="Restore it from another copy of the store.",
            )
        folders.update(match.groups())
    if len(names) != len(index.files) or names & folders:
        raise CorruptionError(
            f"The file index {name!r} names a file twice.",
            todo="Restore it from another copy of the store.",
        )
    return index


def reusable(granted: FileIndex | None, shared: FileIndex | None) -> dict[str, FileEntry]:
    """The files that need not be uploaded again, by name.

    Args:
        granted: the index of the base before, as the coordinator names it: only its objects are
            sure to be kept until the next base is committed.
        shared: the index of the base that the local store was restored from, or uploaded last: only
            of its files are the local ones known to be the same.
    """
    if granted is None or shared is None:
        return {}
    local = {(file.name, file.size_bytes, file.digest) for file in shared.files}
    return {
        file.name: file
        for file in granted.files
        if (file.name, file.size_bytes, file.digest) in local
        and not file.name.rpartition("/")[2].startswith(_CHANGING)
    }
