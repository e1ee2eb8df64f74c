"""`manifest.json` of a savepoint in portable form: what docs/reference/formats.md describes."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import msgspec

from snapshot.storage.object_store import is_name
from statebackend.errors import CorruptionError, UnsupportedFormatError
from statebackend.state.operator_state import BROADCAST, LIST_MODES

__all__ = [
    "MANIFEST_NAME",
    "SOURCES",
    "PortableFile",
    "PortableManifest",
    "PortableOperator",
    "PortableState",
    "PortableTtl",
    "decode_manifest",
    "encode_manifest",
]

MANIFEST_NAME: Final = "manifest.json"
_FORMAT: Final = "statebackend-portable"
_VERSION: Final = 1
SOURCES: Final = "sources/"
_KEYED: Final = ("value", "list", "map", "reducing", "aggregating")
_WITH_MAP_KEY: Final = {
    **dict.fromkeys((*_KEYED, *LIST_MODES), False),
    "map": True,
    BROADCAST: True,
}
_TIME_MODES: Final = ("none", "event", "processing")


class PortableFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file, by its name in the folder. ``rows``: of a Parquet file; None of another."""

    name: str
    size_bytes: int
    sha256: str
    rows: int | None = None


class PortableTtl(msgspec.Struct, frozen=True, kw_only=True):
    """How long entries live; see `TTL`."""

    ms: int
    update: str
    expired: str


class PortableState(msgspec.Struct, frozen=True, kw_only=True):
    """A state: its kind, schemas as Spark's JSON, and files."""

    name: str
    kind: str
    value_schema: dict[str, Any]
    map_key_schema: dict[str, Any] | None
    ttl: PortableTtl | None
    files: list[PortableFile]


class PortableOperator(msgspec.Struct, frozen=True, kw_only=True):
    """An operator with its states and timers. Times: see `Manifest`."""

    uid: str
    parallelism: int
    max_parallelism: int
    time_mode: str
    watermark_ms: int | None
    event_max_ms: int | None
    second_max_ms: int | None
    key_columns: list[str]
    key_schema: dict[str, Any] | None
    states: list[PortableState]
    timers: list[PortableFile]


class PortableManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A savepoint. ``sources``: files of Spark's checkpoint location. Others: see `Savepoint`."""

    format: str = _FORMAT
    version: int = _VERSION
    job: str
    query_id: str
    location: str
    epoch: int
    stamp_ms: int
    watermark_ms: int | None
    next_watermark_ms: int | None
    continuous: bool
    uncommitted: bool
    operators: list[PortableOperator]
    sources: list[PortableFile]


class _Head(msgspec.Struct, frozen=True):
    format: str
    version: int


def encode_manifest(manifest: PortableManifest) -> bytes:
    """`manifest.json`; equal manifests are equal bytes."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def decode_manifest(data: bytes, uri: str) -> PortableManifest:
    """`manifest.json` of a folder.

    Raises:
        CorruptionError: it does not read, or says what cannot be.
        UnsupportedFormatError: it is of a later version.
    """
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format != _FORMAT:
            raise ValueError(f"its format is {head.format!r}")
        if head.version > _VERSION:
            raise UnsupportedFormatError(
                f"The portable savepoint in {uri} has the version {head.version}; this release "
                f"reads up to {_VERSION}.",
                todo="Use a release that is at least as new as the one that wrote it.",
            )
        manifest = msgspec.json.decode(data, type=PortableManifest)
        _check(manifest)
        return manifest
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptionError(
            f"{MANIFEST_NAME} in {uri} does not read ({error}).",
            todo="Export the savepoint once more, or take the folder from another copy.",
        ) from error


def _check(manifest: PortableManifest) -> None:
    """Refuse what would make another state than the files hold, or none that can be read.

    Raises:
        ValueError: what is wrong.
    """
    if manifest.epoch < 0:
        raise ValueError(f"its epoch is {manifest.epoch}")
    _once("operator", [one.uid for one in manifest.operators])
    files = [file.name for file in manifest.sources]
    for one in manifest.operators:
        _check_operator(one)
        files += [file.name for state in one.states for file in state.files]
        files += [file.name for file in one.timers]
    if not manifest.operators:
        raise ValueError("it has no operator")
    _once("file", files)
    _check_sources({file.name for file in manifest.sources})


def _once(what: str, names: list[str]) -> None:
    """Refuse an empty name, and one that comes twice."""
    for name, times in Counter(names).items():
        if not name or times > 1:
            raise ValueError(f"{what} {name!r}: it must have a name, and no other the same")


def _check_operator(one: PortableOperator) -> None:
    _once(f"state of operator {one.uid!r}", [state.name for state in one.states])
    if one.time_mode not in _TIME_MODES:
        raise ValueError(f"the time mode of operator {one.uid!r} is {one.time_mode!r}")
    for state in one.states:
        known = _WITH_MAP_KEY.get(state.kind)
        if known is None:
            raise ValueError(f"the kind of state {state.name!r} is {state.kind!r}")
        if known is not (state.map_key_schema is not None):
            said = "no" if known else "a"
            raise ValueError(f"state {state.name!r}, a {state.kind}, has {said} map_key_schema")
    keyed = any(state.kind in _KEYED for state in one.states) or bool(one.timers)
    if keyed and one.key_schema is None:
        raise ValueError(f"operator {one.uid!r} has no key_schema")


def _check_sources(names: set[str]) -> None:
    """They become files of a checkpoint location."""
    for name in names:
        if not name.startswith(SOURCES) or not is_name(name):
            raise ValueError(f"{name!r} is no file of a checkpoint location")
    if names and f"{SOURCES}metadata" not in names:
        raise ValueError(f"there are sources, and no {SOURCES}metadata")
