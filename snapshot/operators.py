"""What a coordinator is told of operators, and what it asks to be done for them: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from snapshot.bases import Grant
from snapshot.messages import AckRequest, BaseDone
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
    """A begin that may go on: from the state after ``base_epoch``, whose digest is ``chain``.

    ``durable_epoch`` is the newest that the log holds; where that is the epoch before
    ``base_epoch``, ``layer`` is the subtask's ack of ``base_epoch``. ``base_due``: a base is sent
    with the ack. ``grant``: a base is uploaded apart.
    """

    base_epoch: int
    durable_epoch: int
    chain: str
    first_of_run: bool
    base_due: bool
    grant: Grant | None
    layer: AckRequest | None


@dataclass(frozen=True)
class CommitWork:
    """A record to be written: its manifest (without sequence and writer) and its slices' bytes."""

    operator: str
    epoch: int
    acks: dict[int, AckRequest]
    bases: dict[int, BaseDone]
    manifest: Manifest
    bodies: list[bytes | None]
