"""What a coordinator is told of operators, and what it asks to be done for them: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from snapshot.messages import AckRequest
from snapshot.record import Manifest

__all__ = ["Admitted", "CommitWork", "OperatorSpec", "operators_setting"]


def operators_setting(first_epochs: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """What every record says of all operators of its run: their first epochs, by uid.

    An operator that has no record yet is known by it: one that never finished its first epoch must
    not be taken for one that was added later.
    """
    return {"operators": dict(first_epochs)}


class OperatorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An operator as the driver knows it. ``states``: name -> id; ``schemas``: name -> JSON."""

    uid: str
    parallelism: int
    max_parallelism: int
    states: dict[str, int]
    schemas: dict[str, str]


@dataclass(frozen=True)
class Admitted:
    """A begin that may go on: from the state after ``base_epoch``."""

    base_epoch: int
    chain: str
    first_of_run: bool
    base_due: bool


@dataclass(frozen=True)
class CommitWork:
    """A record to be written: its manifest (without sequence and writer) and its slices' bytes."""

    operator: str
    epoch: int
    acks: dict[int, AckRequest]
    manifest: Manifest
    bodies: list[bytes | None]
