"""What a coordinator is told of operators, and what it asks to be done for them: plain data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from snapshot.barriers.job_watermark import JobTime, OperatorTime
from snapshot.formats.object_names import parse_data_name
from snapshot.formats.record import Manifest
from snapshot.protocol.bases import Grant
from snapshot.protocol.lineage import OperatorLineage
from snapshot.protocol.messages import AckRequest, BaseDone, SlicePart
from snapshot.protocol.operator_state_slices import NO_BLOBS, OperatorBlobs
from statebackend.errors import FencedError, ProtocolError

__all__ = [
    "Admitted",
    "CommitWork",
    "OperatorSpec",
    "check_initial",
    "lacks_initial",
    "operators_setting",
    "takes_initial",
]


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


def lacks_initial(
    manifests: Iterable[Manifest], given: Mapping[str, bool], first_epoch: int
) -> list[str]:
    """Operators that would repeat their first epoch without the initial state they had then.

    A later run without the initial state does not change that: a start may still go back over it.

    Args:
        given: whether a start has an initial state, for each of its operators.
        first_epoch: the epoch that the start begins with.
    """
    # By operator: its first epoch, and whether some run gave it.
    had: dict[str, tuple[int, bool]] = {}
    for manifest in manifests:
        initial = manifest.settings.get("initial", ())
        for uid, first in manifest.settings.get("operators", {}).items():
            before = had.get(uid) == (first, True)
            had[uid] = first, before or uid in initial
    return sorted(
        uid
        for uid, has in given.items()
        if not has and uid in had and had[uid][1] and had[uid][0] >= first_epoch
    )


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


def takes_initial(lineage: OperatorLineage | None, first_epoch: int) -> bool:
    """Whether an operator needs its initial state in a run that begins with ``first_epoch``.

    Its first epoch may have been finished before and is repeated all the same.
    """
    return lineage is None or first_epoch <= lineage.first_epoch


def check_initial(specs: Iterable[OperatorSpec], generation: int) -> None:
    """Refuse initial state that cleaning would take for garbage.

    Raises:
        FencedError: its objects are named with an older generation than this driver's.
        ProtocolError: they have no name of ours.
    """
    for spec in specs:
        for part in spec.initial.values():
            found = parse_data_name(part.name)
            if found is None:
                raise ProtocolError(
                    f"The initial state of operator {spec.uid!r} is in {part.name!r}, which is no "
                    f"name of an object of a job.",
                    todo="Start the query again.",
                )
            if found.generation != generation:
                raise FencedError(
                    f"The initial state of operator {spec.uid!r} was written for generation "
                    f"{found.generation} of the job, and this is generation {generation}: another "
                    f"driver has claimed the job meanwhile.",
                    todo="Let one driver run the job. If no other one does, start the query again.",
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
