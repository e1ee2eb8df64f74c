"""A subtask's side of the protocol, the same in both modes: it begins epochs, saves and acks them.

What an ack names is durable before the ack is made. A delta is kept beside the local store last
(see :meth:`statebackend.runtime.worker.worker_store.SubtaskStore.keep`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec
from blake3 import blake3

from recovery.restore.restorer import Site
from snapshot.formats.delta_in_pieces import EncodedDelta
from snapshot.formats.lineage_digest import chain
from snapshot.formats.object_names import data_name
from snapshot.protocol.messages import (
    PROTOCOL,
    AckReply,
    AckRequest,
    AncestorCopy,
    BaseDone,
    BaseRenewal,
    BaseReply,
    BeginReply,
    BeginRequest,
    LocalCopy,
    RestoreReport,
    SlicePart,
)
from snapshot.storage.counting_store import CountingStore, VerbCount
from snapshot.storage.object_store import ObjectStore
from statebackend.operators.operator_snapshot import OperatorSnapshot
from statebackend.rpc.driver_client import Client
from statebackend.rpc.driver_server import Handler
from statebackend.rpc.session_endpoint import Endpoint
from statebackend.runtime.worker.operator_state_io import OperatorStateIO, StateParts
from statebackend.runtime.worker.slice_parts import durable_slice, packed_base
from statebackend.system import SYSTEM, System

__all__ = [
    "AckTimes",
    "EpochStamp",
    "JobSubtask",
    "Membership",
    "Participant",
    "RemoteSession",
    "Saved",
]

_TRIED_TIMES: Final = 4  # state that is so many times the budget on disk will not fit when packed
_NO_DELTA: Final = SlicePart(digest=blake3(b"").hexdigest(), size_bytes=0, rows=0)


@dataclass(frozen=True)
class JobSubtask:
    """One subtask of a job's operator. ``local_name``: the job, as hosts know it."""

    job: str
    local_name: str
    operator: str
    subtask: int
    parallelism: int

    def __str__(self) -> str:
        return f"operator {self.operator!r}, subtask {self.subtask}"


@dataclass(frozen=True)
class RemoteSession:
    """A run's session in the driver, asked over the network (a :class:`Handler`)."""

    client: Client
    endpoint: Endpoint
    timeout_s: float
    ack_timeout_s: float

    def begin(self, request: BeginRequest) -> tuple[BeginReply, list[bytes]]:
        """Ask to begin an epoch; the reply and the slices that come with it."""
        return self.client.begin(self.endpoint, request, timeout_s=self.timeout_s)

    def ack(self, request: AckRequest) -> AckReply:
        """Report a snapshot; may take as long as a commit takes."""
        return self.client.ack(self.endpoint, request, timeout_s=self.ack_timeout_s)

    def base_done(self, request: BaseDone) -> BaseReply:
        """Report a base that is durable."""
        return self.client.base_done(self.endpoint, request, timeout_s=self.timeout_s)

    def base_renewed(self, request: BaseRenewal) -> BaseReply:
        """Say that an upload goes on."""
        return self.client.base_renewed(self.endpoint, request, timeout_s=self.timeout_s)


@dataclass(frozen=True)
class Membership:
    """The run that a subtask belongs to, and whom it asks there.

    Attributes:
        handler: of the run's session. session: its name. query_id: of the run, as its coordinator
            has it.
        attempt: numbers this try of a task, or this start of a stream's subtask.
    """

    handler: Handler
    session: str
    query_id: str
    attempt: int = 0


@dataclass(frozen=True)
class EpochStamp:
    """An epoch and its stamp (see `snapshot.protocol.stamps`)."""

    epoch: int
    stamp_ms: int
    nonce: int = 0


@dataclass(frozen=True)
class AckTimes:
    """The times in an ack: see :class:`AckRequest`."""

    max_event_ms: int | None = None
    second_event_ms: int | None = None
    next_timer_ms: int | None = None


@dataclass(frozen=True)
class Saved:
    """What an epoch changed, durable unless it goes with the ack.

    Attributes:
        chain: the lineage that ends with it. room_bytes: left in the record.
        base: the whole state, if it is small and due. large_bytes: its size, if it is too large.
    """

    chain: str
    delta: SlicePart
    parts: StateParts
    room_bytes: int
    base: SlicePart | None = None
    large_bytes: int = 0


class Participant:
    """One subtask, as the coordinator knows it: for one try of a task, or a stream's subtask.

    Args:
        store: the durable one.

    Attributes:
        store: counts what is asked of it. durable: the same one, uncounted.
        site: where the subtask runs. operator_state: its states that belong to no key.
    """

    def __init__(
        self, who: JobSubtask, member: Membership, store: ObjectStore, system: System = SYSTEM
    ) -> None:
        self.who, self.member, self.system = who, member, system
        self.durable, self.store = store, CountingStore(store)
        self.site = Site(who.operator, who.subtask, system.host_name(), system.executor_name())
        self.operator_state = OperatorStateIO(
            who.local_name, who.operator, who.subtask, who.parallelism, self.store
        )
        self._counts: dict[str, VerbCount] = {}

    def begin(
        self, at: EpochStamp, copy: LocalCopy, ancestors: list[AncestorCopy] | None = None
    ) -> tuple[BeginReply, list[bytes]]:
        """Ask to begin an epoch; the reply, and the bytes of its steps that are in the record.

        Raises:
            StateBackendError: the coordinator refused, or was not reached.
        """
        who, member, site = self.who, self.member, self.site
        request = BeginRequest(
            protocol=PROTOCOL,
            job=who.job,
            session=member.session,
            operator=who.operator,
            subtask=who.subtask,
            epoch=at.epoch,
            stamp_ms=at.stamp_ms,
            query_id=member.query_id,
            attempt=member.attempt,
            host=site.host,
            executor=site.executor,
            copy=copy,
            ancestors=ancestors,
            held=self.operator_state.held(),
            nonce=at.nonce,
        )
        reply, bodies = member.handler.begin(request)
        return reply, self.operator_state.split_off(reply, bodies)

    def save(
        self,
        epoch: int,
        reply: BeginReply,
        delta: EncodedDelta | None,
        snapshot: OperatorSnapshot,
        *,
        live_bytes: int = 0,
    ) -> Saved:
        """Make an epoch's changes durable, as far as the ack has no room for them.

        Args:
            delta: of the keyed state; None: there is none.
            snapshot: of the states that belong to no key, whole.
            live_bytes: of the keyed state.

        Raises:
            StateBackendError: the store did not take them.
        """
        budget_bytes, part = reply.inline_budget_bytes, _NO_DELTA
        if delta is not None:
            name = self._new_name(epoch, reply)
            part = durable_slice(self.store, delta, budget_bytes, name)
        room_bytes = budget_bytes - len(part.data)
        names = [self._new_name(epoch, reply) for _ in "lm"]
        parts = self.operator_state.write(snapshot, reply, names, room_bytes)
        return Saved(
            chain=chain(bytes.fromhex(reply.chain), bytes.fromhex(part.digest)).hex(),
            delta=part,
            parts=parts,
            room_bytes=room_bytes - parts.inline_bytes,
            large_bytes=live_bytes if live_bytes > _TRIED_TIMES * budget_bytes else 0,
        )

    def with_base(
        self,
        saved: Saved,
        epoch: int,
        reply: BeginReply,
        entries: Sequence[tuple[bytes, bytes]],
    ) -> Saved:
        """The same with the whole state, if that is small; or with its size.

        Args:
            entries: of the whole keyed state, in key order.
        """
        name, limit_bytes = self._new_name(epoch, reply), reply.inline_budget_bytes
        base, size_bytes = packed_base(entries, self.store, limit_bytes, saved.room_bytes, name)
        return replace(saved, base=base, large_bytes=size_bytes)

    def _new_name(self, epoch: int, reply: BeginReply) -> str:
        return data_name(reply.generation, epoch, self.system.new_id())

    def ack(
        self,
        at: EpochStamp,
        saved: Saved,
        attempt: int,
        times: AckTimes,
        figures: dict[str, int],
        report: RestoreReport | None,
    ) -> AckRequest:
        """The ack of what was saved, without its timings.

        Args:
            attempt: at the epoch. report: of the opening, in its first epoch.
        """
        who, parts = self.who, saved.parts
        return AckRequest(
            protocol=PROTOCOL,
            job=who.job,
            session=self.member.session,
            operator=who.operator,
            subtask=who.subtask,
            epoch=at.epoch,
            stamp_ms=at.stamp_ms,
            attempt=attempt,
            chain=saved.chain,
            delta=saved.delta,
            base=saved.base,
            large_bytes=saved.large_bytes,
            max_event_ms=times.max_event_ms,
            second_event_ms=times.second_event_ms,
            next_timer_ms=times.next_timer_ms,
            figures=figures,
            restore=report,
            operator_state=parts.lists,
            broadcast=parts.maps,
            broadcast_digest=parts.maps_digest,
        )

    def with_requests(self, ack: AckRequest, timings_ms: dict[str, float]) -> AckRequest:
        """An ack with how long it took, and what was asked of the object store since the last."""
        before, now = self._counts, self.store.counts
        self._counts = now
        requests, errors, figures = {}, {}, dict(ack.figures)
        for verb, count in now.items():
            earlier = before.get(verb, VerbCount())
            if count.requests > earlier.requests:
                moved_bytes = count.size_bytes - earlier.size_bytes
                requests[verb] = count.requests - earlier.requests, moved_bytes
            if count.errors > earlier.errors:
                errors[verb] = count.errors - earlier.errors
        if retries := self.store.take_retries():
            figures["retries"] = retries
        return msgspec.structs.replace(
            ack,
            timings_ms=timings_ms,
            figures=figures,
            requests=requests,
            request_errors=errors,
        )
