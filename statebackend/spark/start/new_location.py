"""What the checkpoint location of a query holds that begins with a savepoint."""

from __future__ import annotations

import json
from dataclasses import dataclass

from blake3 import blake3

from recovery.savepoints.savepoint import Savepoint
from statebackend.errors import SettingError

__all__ = ["LocationFile", "location_files"]


@dataclass(frozen=True)
class LocationFile:
    """A file of a new location: ``body`` is its own, else it is the savepoint's."""

    digest: str
    body: bytes | None = None


def location_files(savepoint: Savepoint, sources: int | None) -> dict[str, LocationFile]:
    """What the location of a query is to hold that begins with a savepoint, but for `metadata`.

    After a continuous job, or where the savepoint says nothing of sources: a plan of its batch
    (Spark asks for the one before, too) in which no source has given anything yet.

    Raises:
        SettingError: it is not known how many sources that are.
    """
    if savepoint.spark:
        known = (file for file in savepoint.spark if file.name != "metadata")
        return {file.name: LocationFile(file.digest) for file in known}
    if sources is None:
        raise SettingError(
            "The savepoint says nothing of Spark's sources, so a query that begins with it is not "
            "started by backend.starting(): how many sources it has must be known before.",
            todo="Use backend.start(writer).",
        )
    epoch = savepoint.epoch
    head = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": savepoint.stamp_ms, "conf": {}})
    plan = "\n".join(["v1", head, *["-"] * sources]).encode()
    bodies = {f"offsets/{n}": plan for n in (epoch - 1, epoch) if n >= 0}
    bodies[f"commits/{epoch}"] = b'v1\n{"nextBatchWatermarkMs":0}'
    return {name: LocationFile(blake3(one).hexdigest(), one) for name, one in bodies.items()}
