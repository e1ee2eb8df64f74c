"""What the checkpoint location of a query holds that begins with a savepoint."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from recovery.savepoints.savepoint import SPARK_FOLDER, Savepoint
from recovery.savepoints.source_files import NO_OFFSET, file_source_offset
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import CheckpointLocationError, CorruptionError, SettingError
from statebackend.spark.frames.heartbeat import SOURCE_NAME
from statebackend.spark.frames.repeatable_sources import Source

__all__ = ["LocationFile", "location_files"]

_OFFSETS: Final = "offsets"
_SOURCES: Final = "sources"


@dataclass(frozen=True)
class LocationFile:
    """A file of a new location.

    Attributes:
        body: what it holds; None: what a file of the savepoint does.
        copied: that file's name, if it is another.
    """

    digest: str
    body: bytes | None = None
    copied: str = ""


def location_files(
    savepoint: Savepoint, sources: Sequence[Source] | None, store: ObjectStore
) -> dict[str, LocationFile]:
    """What the location of a query is to hold that begins with a savepoint, but for `metadata`.

    After a continuous job, or where the savepoint says nothing of sources: a plan of its batch
    (Spark asks for the one before, too) in which no source has given anything yet. After a query of
    Spark's own operators: its plans, with a place for each heartbeat that this query has.

    Args:
        sources: the query's, in Spark's order. store: the savepoint's folder.

    Raises:
        SettingError: they are not known, and must be.
        CheckpointLocationError: they are not as many as the savepoint knows.
        CorruptionError: a plan of the savepoint is damaged.
    """
    known = {file.name: file.digest for file in savepoint.spark if file.name != "metadata"}
    if known and savepoint.next_watermark_ms is None:
        return {name: LocationFile(digest) for name, digest in known.items()}
    if sources is None:
        raise SettingError(
            "The savepoint does not say all of the query's sources, so a query that begins with it "
            "is not started by backend.starting(): which and how many sources it has must be known "
            "before.",
            todo="Use backend.start(writer).",
        )
    if known:
        return _with_heartbeats(known, sources, store)
    epoch = savepoint.epoch
    head = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": savepoint.stamp_ms, "conf": {}})
    plan = "\n".join(["v1", head, *[NO_OFFSET] * len(sources)]).encode()
    bodies = {f"offsets/{n}": plan for n in (epoch - 1, epoch) if n >= 0}
    bodies[f"commits/{epoch}"] = b'v1\n{"nextBatchWatermarkMs":0}'
    return {name: _own(one) for name, one in bodies.items()}


def _with_heartbeats(
    known: Mapping[str, str], sources: Sequence[Source], store: ObjectStore
) -> dict[str, LocationFile]:
    """The files of a query without heartbeats, for one that has them: offsets go by place.

    Spark counts places in a plan, and sources in the names of their folders: a source that a query
    reads in two places has two offsets, which are the same, and one folder.
    """
    sources_ours = dict.fromkeys(one.number for one in sources if one.name != SOURCE_NAME)
    folders = {str(theirs): number for theirs, number in enumerate(sources_ours)}
    kept = {folders.get(name.split("/")[1]) for name in known if name.startswith(f"{_SOURCES}/")}
    files = {}
    for name, digest in known.items():
        folder, _, rest = name.partition("/")
        number, _, file = rest.partition("/")
        if folder == _OFFSETS:
            lines = _plan(store, name, digest).split("\n")
            offsets = _placed(lines[2:], sources, kept)
            if offsets is None:
                raise _other_sources(lines[2:], sources, store)
            files[name] = _own("\n".join([*lines[:2], *offsets]).encode())
        elif folder == _SOURCES and number in folders:
            files[f"{_SOURCES}/{folders[number]}/{file}"] = LocationFile(digest, copied=name)
        else:
            files[name] = LocationFile(digest)
    return files


def _placed(
    offsets: Sequence[str], sources: Sequence[Source], kept: Collection[int | None]
) -> list[str] | None:
    """The offsets of a plan, and "-" for each heartbeat; None: they are of other sources.

    Args:
        kept: the numbers of sources that have a folder; None among them: one is of no source.
    """
    if len(offsets) != sum(one.name != SOURCE_NAME for one in sources) or None in kept:
        return None
    left = iter(offsets)
    said: dict[int, str] = {}
    placed = []
    for one in sources:
        offset = NO_OFFSET if one.name == SOURCE_NAME else next(left)
        if said.setdefault(one.number, offset) != offset:
            return None
        if file_source_offset(offset) is not None and one.number not in kept:
            return None
        placed.append(offset)
    return placed


def _plan(store: ObjectStore, name: str, digest: str) -> str:
    data = store.get(f"{SPARK_FOLDER}{name}")
    if blake3(data).hexdigest() != digest:
        raise CorruptionError(
            f"The file {SPARK_FOLDER}{name} in {store.uri} is not what savepoint.json names.",
            todo="Restore it from another copy of the store, or use another savepoint.",
        )
    return data.decode()


def _other_sources(
    offsets: Sequence[str], sources: Sequence[Source], store: ObjectStore
) -> CheckpointLocationError:
    ours = [one.name for one in sources if one.name != SOURCE_NAME]
    return CheckpointLocationError(
        f"The savepoint {store.uri} says in {len(offsets)} place(s) where sources stood, and they "
        f"are not the query's, which reads {len(ours)} ({', '.join(ours)}).",
        todo="Give the query the sources that it had in Spark, in the same order. Where it read "
        "one frame in two places, it must not read it anew for each.",
    )


def _own(body: bytes) -> LocationFile:
    return LocationFile(blake3(body).hexdigest(), body)
