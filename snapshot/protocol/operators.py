"""What a coordinator is told of operators, and what it asks to be done for them: plain data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from snapshot.barriers.job_watermark import JobTime, OperatorTime
from snapshot.formats.record import Manifest
from snapshot.protocol.base_leases import Grant
from snapshot.protocol.messages import AckRequest, BaseDone, SlicePart
from snapshot.protocol.operator_state_slices import NO_BLOBS, OperatorBlobs

__all__ = ["Admitted", "CommitWork", "OperatorSpec", "operators_setting"]


def operators_setting(
    first_epochs: Mapping[str, int], initial: Collection[str] = ()
) -> dict[str, Any]:
    """What every record says of all operators of its run: their first epochs, by uid.

    An operator that has no record yet is known by it: one that never finished its first epoch must
    not be taken for one that was added later.

    Args:
        initial: operators that the run was given an initial state for. Records say so, too: once
            a first epoch has another record, its claim may not be among what is read any more.
    """
    said: dict[str, Any] = {"operators": dict(first_epochs)}
    if initial:
        said["initial"] = sorted(initial)
    return said


class OperatorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An operator as the driver knows it.

    Attributes:
        states: ids by name. schemas: JSON by name.
        time_mode: none, processing or event: what its timers run on.
        watermark_delay_ms: how late its rows may be. An operator without one takes the job's
            watermark and has no say in it.
        two_inputs: it measures two streams, and goes by the one that is behind.
        initial: its initial state by subtask, for its first epoch: objects that are durable,
            named by `snapshot.formats.object_names.data_name` with the generation and the epoch
            that begin.
        dropped: those of ``states`` that were deleted by name (see `snapshot.formats.state_ids`).
        versions: value schemas (JSON, oldest first) of states that have had more than one, by name.
    """

    uid: str
    parallelism: int
    max_parallelism: int
    states: dict[str, int]
    schemas: dict[str, str]
    time_mode: str = "none"
    watermark_delay_ms: int | None = None
    two_inputs: bool = False
    initial: dict[int, SlicePart] = {}
    dropped: dict[str, int] = {}
    versions: dict[str, list[str]] = {}

    def time(
        self,
        event_max_ms: int | None,
        next_timer_ms: int | None,
        second_max_ms: int | None = None,
    ) -> OperatorTime:
        """Its part in the job's time at the end of an epoch."""
        return OperatorTime(
            time_mode=self.time_mode,
            delay_ms=self.watermark_delay_ms,
            event_max_ms=event_max_ms,
            two_inputs=self.two_inputs,
            second_max_ms=second_max_ms,
            next_timer_ms=next_timer_ms,
        )


@dataclass(frozen=True)
class Admitted:
    """A begin that may go on: from the state after ``base_epoch``, whose digest is ``chain``.

    ``durable_epoch`` is the newest that the log holds; where that is the epoch before
    ``base_epoch``, ``layer`` is the subtask's ack of ``base_epoch``. ``base_due``: a base is sent
    with the ack. ``grant``: a base is uploaded apart. ``time``: the epoch's watermarks.
    ``initial``: the subtask's initial state. ``dropped``: states to be deleted, by id, ascending.
    ``blobs``: the operator's states that belong to no key, after ``base_epoch``.
    """

    base_epoch: int
    durable_epoch: int
    chain: str
    first_of_run: bool
    base_due: bool
    grant: Grant | None
    layer: AckRequest | None
    time: JobTime
    initial: SlicePart | None
    dropped: tuple[int, ...]
    blobs: OperatorBlobs = NO_BLOBS


@dataclass(frozen=True)
class CommitWork:
    """A record to be written: its manifest (without sequence and writer) and its slices' bytes."""

    operator: str
    epoch: int
    acks: dict[int, AckRequest]
    bases: dict[int, BaseDone]
    manifest: Manifest
    bodies: list[bytes | None]
