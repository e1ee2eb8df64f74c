"""The log as it grows, parsed once for all checkers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from snapshot.formats.record import LOG_PREFIX, Record, parse_record, parse_record_name
from tests.sim.bucket import Bucket

__all__ = ["Checker", "Ledger", "Stopped"]


class Stopped(Exception):
    """A checker has seen enough."""


class Checker:
    """What a checker may want to see; each does nothing by itself."""

    name = ""

    def __init__(self, world: Any) -> None:
        self.world = world

    def violated(self, what: str) -> None:
        """Say that something is which must never be."""
        self.world.violated(self.name, what)

    def record(self, sequence: int, record: Record) -> None:
        """A record is in the log."""

    def rewritten(self, name: str) -> None:
        """An object that was there was written again, with other bytes."""

    def record_deleted(self, sequence: int, record: Record) -> None:
        """A record is no more."""

    def created(self, name: str) -> None:
        """Another object is there."""

    def deleted(self, name: str) -> None:
        """Another object is no more."""


class Ledger:
    """Watches the bucket.

    Attributes:
        records: by sequence, those that are there.
    """

    def __init__(self, bucket: Bucket, checkers: Sequence[Checker]) -> None:
        self._bucket, self._checkers = bucket, checkers
        self.records: dict[int, Record] = {}

    def created(self, name: str, data: bytes) -> None:
        if name.startswith(LOG_PREFIX):
            sequence = parse_record_name(name)
            assert sequence is not None
            record = self.records[sequence] = parse_record(data, name)
            for checker in self._checkers:
                checker.record(sequence, record)
        else:
            for checker in self._checkers:
                checker.created(name)

    def replaced(self, name: str, before: bytes, data: bytes) -> None:
        if before != data or name.startswith(LOG_PREFIX):
            for checker in self._checkers:
                checker.rewritten(name)

    def deleted(self, name: str, data: bytes) -> None:
        if name.startswith(LOG_PREFIX):
            sequence = parse_record_name(name)
            assert sequence is not None
            record = self.records.pop(sequence)
            for checker in self._checkers:
                checker.record_deleted(sequence, record)
        else:
            for checker in self._checkers:
                checker.deleted(name)
