"""What a drill tells its drivers, and what they tell it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from snapshot.protocol.messages import RestoreReport

__all__ = [
    "JOB",
    "REBALANCE",
    "SAVEPOINT",
    "SAVEPOINT_ANSWER",
    "DriverConfig",
    "Event",
    "Events",
    "Taken",
]

JOB: Final = "drill"
"""The name of the job that is drilled."""

REBALANCE: Final = "rebalance"
"""A file of this name in the drill's folder asks for that, and says on how many executors.

The driver removes it when it is done.
"""

SAVEPOINT: Final = "savepoint"
"""A file of this name asks for a savepoint, and says where to; the driver removes it when done."""

SAVEPOINT_ANSWER: Final = "savepoint-taken"
"""What it says then: a `Taken`."""


class DriverConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a driver's process needs to know.

    It may hold secrets (a store's key in `conf`), so it goes through a file that only its owner can
    read: every user of a machine can read the arguments of a process.

    Attributes:
        kind: of the job: see `recovery.drill.jobs.job_kinds`.
        build: the job's function as `module:name`.
        start: arguments of a continuous job's start.
        job: its name in the store.
        savepoint: the URI of what it begins with; empty: with nothing.
    """

    root: str
    master: str
    uri: str
    local_dir: str
    checkpoint: str
    out: str
    events: str
    stop: str
    build: str
    parallelism: int
    commit: str
    settings: dict[str, Any] = {}
    conf: dict[str, str] = {}
    kind: str = "batches"
    start: dict[str, Any] = {}
    job: str = JOB
    savepoint: str = ""

    def write(self, path: Path) -> None:
        """Put it into a new file. Raises `OSError`."""
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(msgspec.json.encode(self))

    @classmethod
    def read(cls, path: Path) -> DriverConfig:
        """What was written there. Raises `OSError`, `msgspec.ValidationError`."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a driver's events.

    `restarted`: the job failed, and started again in the same driver.
    """

    kind: Literal["ready", "restore", "epoch", "restarted", "idle", "busy", "finished", "failed"]
    restore: RestoreReport | None = None
    epoch: int = -1
    error: str = ""


class Events:
    """A driver's file of events; each is there as soon as it is told."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def tell(self, event: Event) -> None:
        """Write one more."""
        self._file.write(msgspec.json.encode(event) + b"\n")


class Taken(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a savepoint: where it lies and its epoch, or why there is none.

    Attributes:
        cannot: why a clone of such a job need not be exact, or why it can have no savepoint.
    """

    uri: str = ""
    epoch: int = -1
    cannot: str = ""
    error: str = ""
