"""A job with a key that is to be erased, and where its bytes are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import statebackend
from recovery.savepoints.create_savepoint import Making, create_savepoint
from recovery.savepoints.location_files import LocationFiles
from recovery.savepoints.savepoint import Savepoint, default_folder
from snapshot.formats.delta import decode_delta
from snapshot.formats.history_object import HISTORY_PREFIX, decode_history
from snapshot.formats.record import parse_record
from snapshot.log.commit_log import CommitLog
from snapshot.storage.object_store import ObjectStore
from snapshot.storage.stores_by_uri import open_store
from statebackend import system
from statebackend.tables.erase_keys import erase_keys
from tests.recovery.savepoints.saved_jobs import Location
from tests.support.golden import Kept
from tests.support.inprocess import InProcessJob

__all__ = [
    "ANN",
    "JOB",
    "OTHERS",
    "PATTERN",
    "STATES",
    "Going",
    "holding",
    "of_others",
    "saved",
    "saved_below",
]

JOB = "job"
ANN = 0x1234_5678_9ABC_DEF
OTHERS = range(8)
PATTERN = (ANN ^ (1 << 63)).to_bytes(8, "big")  # as it stands in keys
STATES = ("last", "all", "times", "most", "last_ttl", "all_ttl", "times_ttl")


class Going:
    """A job with ANN and others, its checkpoint location, and what it holds."""

    def __init__(self, folder: Path, epochs: int = 4, **settings: Any) -> None:
        self.folder, self.settings = folder, settings
        (folder / JOB).mkdir(parents=True)
        (folder / "run").mkdir()
        (folder / "run" / "store").symlink_to(folder / JOB)
        self.location = Location(open_store(f"file://{folder}/location", new_id=system.new_id))
        self.location.put("metadata", json.dumps({"id": "query"}))
        self.job = self.start()
        for _ in range(epochs):
            self.run(ANN, *OTHERS)

    def start(self, parallelism: int = 2) -> InProcessJob:
        job = InProcessJob(
            self.folder / "run", name=JOB, time_mode="processing", retain_epochs=3, **self.settings
        )
        job.start(Kept(), parallelism=parallelism)
        self.job = job
        return job

    def run(self, *keys: int) -> None:
        self.job.run([(key, self.job.epoch) for key in keys])
        self.location.batches(1)

    @property
    def uri(self) -> str:
        return f"file://{self.folder}"

    @property
    def store(self) -> ObjectStore:
        return open_store(f"{self.uri}/{JOB}", new_id=system.new_id)

    def erase(self, **more: Any) -> Any:
        place = f"{self.uri}/location"
        return erase_keys(self.uri, JOB, "op", [ANN], checkpoint_location=place, **more)

    def rows(self, **of: Any) -> dict[str, list[dict[str, Any]]]:
        place = (None, None) if of else (self.uri, JOB)
        found = {
            name: statebackend.read_state(*place, "op", name, **of).read_all().to_pylist()
            for name in STATES
        }
        found["timers"] = statebackend.read_timers(*place, "op", **of).read_all().to_pylist()
        return found


def of_others(rows: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [one for one in found if one["key"]["k"] != ANN] for name, found in rows.items()}


def holding(store: ObjectStore, pattern: bytes = PATTERN) -> set[str]:
    """The objects that have a key in their bytes, or in what they hold packed."""
    found = set()
    for info in store.list(""):
        if any(pattern in piece for piece in contents(store, info.name)):
            found.add(info.name)
    return found


def contents(store: ObjectStore, name: str) -> Iterator[bytes]:
    data = store.get(name)
    yield data
    if name.startswith(HISTORY_PREFIX):
        yield msgspec.json.encode(decode_history(name, data))
    packed = [data] if name.startswith("data/") else []
    if name.startswith("log/"):
        record = parse_record(data, name)
        packed += [
            record.slice(one)
            for one in record.manifest.slices
            if one.kind in ("delta", "base") and one.object is None and one.size_bytes
        ]
    for one in packed:
        rows = decode_delta(one)
        yield from rows.keys.to_pylist()
        yield from (value or b"" for value in rows.values.to_pylist())


def saved(going: Going) -> Savepoint:
    """A savepoint of the job, where the job's savepoints lie."""
    return saved_below(going.uri, going.location.files())


def saved_below(uri: str, location: LocationFiles) -> Savepoint:
    """The same, of the job below a URI."""
    store = open_store(f"{uri}/{JOB}", new_id=system.new_id)
    log = lambda: CommitLog(store, job=JOB, writer="test", new_id=system.new_id)  # noqa: E731
    return create_savepoint(
        Making(
            store=store,
            job=JOB,
            location=location,
            manifests=lambda: log().manifests(),
            open_target=lambda name: open_store(
                default_folder(uri, JOB, name), new_id=system.new_id
            ),
            new_id=system.new_id,
            now_ms=system.wall_ms,
            writer="test",
        )
    )
