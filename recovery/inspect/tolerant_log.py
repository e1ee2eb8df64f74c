"""Reads a job's log as far as it reads: without a claim, damaged or not."""

from __future__ import annotations

from dataclasses import dataclass

from snapshot.formats.record import Manifest, parse_record_name, read_manifest, record_name
from snapshot.storage.object_store import ObjectInfo, ObjectStore
from statebackend.errors import (
    CorruptionError,
    FormatError,
    NotRestorableError,
    ObjectNotFoundError,
)

__all__ = ["LogRead", "read_log", "read_one", "require_tip"]


@dataclass(frozen=True, kw_only=True)
class LogRead:
    """Every record of a job's log, as far as it reads.

    Attributes:
        listing: the whole log folder.
        manifests: by sequence. damaged: why the others do not read, by sequence.
        tip: the newest record that reads; None if none does.
    """

    listing: list[ObjectInfo]
    manifests: dict[int, Manifest]
    damaged: dict[int, FormatError]

    @property
    def tip(self) -> Manifest | None:
        """The newest record that reads."""
        return self.manifests[max(self.manifests)] if self.manifests else None

    @property
    def sequences(self) -> list[int]:
        """Every sequence in the store, ascending."""
        return sorted([*self.manifests, *self.damaged])

    @property
    def oldest_needed(self) -> int:
        """As the tip says."""
        return self.tip.oldest_needed if self.tip else 0

    @property
    def live(self) -> list[Manifest]:
        """What reads of the records that are needed, ascending."""
        return [self.manifests[s] for s in sorted(self.manifests) if s >= self.oldest_needed]

    @property
    def missing(self) -> list[int]:
        """Sequences that are needed and not there at all."""
        there = {*self.manifests, *self.damaged}
        end = max(there, default=-1) + 1
        return [s for s in range(self.oldest_needed, end) if s not in there]


def read_log(store: ObjectStore, job: str) -> LogRead:
    """Read the manifest of every record; one listing, and one or two requests per record.

    Args:
        store: the job's folder. job: its name; a record of another one is damage.

    Raises:
        StoreUnreachableError: a failure that may pass: never taken for damage.
    """
    listing = store.list("log/")
    manifests: dict[int, Manifest] = {}
    damaged: dict[int, FormatError] = {}
    for info in listing:
        sequence = parse_record_name(info.name)
        if sequence is None:
            continue
        try:
            manifests[sequence] = read_one(store, sequence, job)
        except FormatError as error:
            damaged[sequence] = error
        except ObjectNotFoundError:
            continue  # cleaned since the listing
    return LogRead(listing=listing, manifests=manifests, damaged=damaged)


def read_one(store: ObjectStore, sequence: int, job: str) -> Manifest:
    """One record's manifest, checked to be of this slot and job.

    Raises:
        CorruptionError, UnsupportedFormatError, ObjectNotFoundError, StoreUnreachableError
    """
    name = record_name(sequence)
    manifest = read_manifest(store, name)
    if manifest.sequence != sequence or manifest.job != job:
        raise CorruptionError(
            f"The record {name!r} says that it is number {manifest.sequence} of the job "
            f"{manifest.job!r}.",
            todo="Restore it from another copy of the store.",
        )
    return manifest


def require_tip(log: LogRead, store: ObjectStore) -> Manifest:
    """The tip.

    Raises:
        NotRestorableError: there is no log, or nothing in it reads.
    """
    if log.tip is not None:
        return log.tip
    if log.damaged:
        raise NotRestorableError(
            f"None of the {len(log.damaged)} records in {store.uri} reads.",
            todo="Restore the folder from another copy, or use the release that wrote it.",
        )
    raise NotRestorableError(
        f"There is no job in {store.uri}: it has no commit log.",
        todo="Check the URI and the job's name (statebackend list shows what is there).",
    )
