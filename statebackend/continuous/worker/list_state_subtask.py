"""Subtasks without keyed state, such as those of sources and sinks: lists, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from blake3 import blake3

from snapshot.formats.delta import chain, encode_delta
from snapshot.protocol.messages import BeginReply, LocalCopy, SlicePart
from snapshot.storage.object_store import ObjectStore
from statebackend.continuous.worker.checkpointed_state import (
    Background,
    CheckpointedState,
    Frozen,
    Made,
    Membership,
    SharedFuture,
    VertexSpec,
)
from statebackend.errors import ProtocolError
from statebackend.operators.declared_states import EpochState, EpochTimes, StateDeclaration
from statebackend.state.cursor import KeyCursor
from statebackend.state.table import MemoryBase, StateTable
from statebackend.system import SYSTEM, System

__all__ = ["PlainState"]

_NOTHING: Final = blake3(b"").digest()


class PlainState(CheckpointedState):
    """The operator lists of a subtask that has no keyed state; the face of `SubtaskState`.

    There is no store and no local copy: the lists are in the records, or in objects of their own.

    Args:
        declared: the lists (kind ``split`` or ``union``), by name.
        versions: the schemas of lists that have had several, by name.

    Attributes:
        lists: what :meth:`open` brought back, by name.
    """

    def __init__(
        self,
        spec: VertexSpec,
        subtask: int,
        member: Membership,
        *,
        declared: Mapping[str, StateDeclaration],
        store: ObjectStore,
        background: Background,
        versions: Mapping[str, Sequence[str]] | None = None,
        system: System = SYSTEM,
    ) -> None:
        super().__init__(spec, subtask, member, store=store, background=background, system=system)
        self._declared, self._versions = declared, versions
        self.lists: Mapping[str, Any] = {}
        self._figures: Callable[[], dict[str, int]] = dict

    def open(self, epoch: int, stamp_ms: int) -> BeginReply:
        """Begin the run's first epoch, with the lists as they were after the one before.

        Raises:
            StateBackendError: the coordinator refused, or they cannot be restored.
        """
        self.epoch, self._stamp_ms = epoch, stamp_ms
        reply, _ = self._ask(LocalCopy(), None)
        if reply.look_for:
            reply, _ = self._ask(LocalCopy(), [])
        if any(step.rows for step in (*reply.steps, *reply.layers)):
            raise ProtocolError(
                f"The checkpoint has keyed state of {self._vertex.uid!r}, which takes none now.",
                todo="Give the vertex another uid, or start from another checkpoint.",
            )
        state = EpochState(
            KeyCursor(),
            StateTable(MemoryBase()),
            declared=self._declared,
            ids=dict.fromkeys(self._declared, 0),
            times=EpochTimes(),
            versions=self._versions or reply.versions,
            stored=self.operator_state_io.read(reply),
        )
        self._held, self.lists = state.operator, state.operator.states
        self._begun = SharedFuture.of(reply)
        return reply

    def freeze(self, attempt: int, figures: Mapping[str, int] | None = None) -> Frozen:
        """The lists as they are at a barrier; at the barrier, on the subtask's own thread.

        Args:
            figures: counts that go with the ack.
        """
        started_s = self._system.monotonic_s()
        self._freezing(attempt)
        stored = self._held.frozen()
        sync_ms = round((self._system.monotonic_s() - started_s) * 1000, 3)
        return Frozen(attempt, stored, figures=dict(figures or {}), sync_ms=sync_ms)

    def _following(
        self, attempt: int, epoch: int, chain: str
    ) -> tuple[SharedFuture[BeginReply], SharedFuture[None]]:
        before = self._begun

        def begin() -> BeginReply:
            last = before.get()
            # It stands at that epoch, as far as the coordinator needs to know: nothing is sent.
            copy = LocalCopy(job_id=last.job_id, epoch=epoch - 1, chain=chain)
            return self._begin_next(copy, chain)

        return SharedFuture(begin, self._system.threads), SharedFuture.of(None)

    def _make(self, frozen: Frozen, reply: BeginReply, epoch: int) -> Made:
        delta = SlicePart(digest=_NOTHING.hex(), size_bytes=0, rows=0)
        base = None
        if reply.base_due:  # it says that nothing before it is needed
            empty = encode_delta([], [])
            base = SlicePart(
                digest=empty.digest.hex(), size_bytes=len(empty.data), rows=0, data=empty.data
            )
        parts = self._state_parts(frozen, reply, reply.inline_budget_bytes)
        return Made(
            chain=chain(bytes.fromhex(reply.chain), _NOTHING).hex(),
            delta=delta,
            base=base,
            figures=frozen.figures,
            operator_state=parts.lists,
            broadcast=parts.maps,
            broadcast_digest=parts.maps_digest,
        )

    def close(self, error: BaseException | None = None) -> None:
        """The subtask ends; may be called twice."""
        self._stop()
