"""Subtasks without keyed state, such as those of sources and sinks: lists, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from snapshot.formats.delta import encode_delta
from snapshot.protocol.messages import AckRequest, BeginReply, LocalCopy, SlicePart
from statebackend.continuous.worker.checkpointed_state import (
    Background,
    CheckpointedState,
    Confirmed,
    Frozen,
    SharedFuture,
)
from statebackend.errors import ProtocolError
from statebackend.operators.declared_states import EpochState, EpochTimes, StateDeclaration
from statebackend.operators.operator_snapshot import encoded
from statebackend.runtime.worker.participant import AckTimes, Participant
from statebackend.state.key_cursor import KeyCursor
from statebackend.state.table import MemoryBase, StateTable

__all__ = ["PlainState"]


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
        participant: Participant,
        background: Background,
        *,
        declared: Mapping[str, StateDeclaration],
        versions: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        super().__init__(participant, background)
        self._declared, self._versions = declared, versions
        self.lists: Mapping[str, Any] = {}

    def open(self, epoch: int, stamp_ms: int) -> BeginReply:
        """Begin the run's first epoch, with the lists as they were after the one before.

        Raises:
            StateBackendError: the coordinator refused, or they cannot be restored.
        """
        self.epoch, self._stamp_ms = epoch, stamp_ms
        participant = self._participant
        reply, _ = participant.begin(self._at, LocalCopy())
        if reply.look_for:
            reply, _ = participant.begin(self._at, LocalCopy(), [])
        if any(step.rows for step in (*reply.steps, *reply.layers)):
            raise ProtocolError(
                f"The checkpoint has keyed state of {participant.who.operator!r}, which takes none "
                "now.",
                todo="Give the vertex another uid, or start from another checkpoint.",
            )
        state = EpochState(
            KeyCursor(),
            StateTable(MemoryBase()),
            declared=self._declared,
            ids=dict.fromkeys(self._declared, 0),
            times=EpochTimes(),
            versions=self._versions or reply.versions,
            stored=participant.operator_state.read(reply),
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

    def _confirm(self, attempt: int, chain: str) -> Confirmed:
        before, epoch = self._begun, self.epoch

        def copy() -> LocalCopy:
            # It stands at that epoch, as far as the coordinator needs to know: nothing is sent.
            return LocalCopy(job_id=before.get().job_id, epoch=epoch - 1, chain=chain)

        return Confirmed(copy, lambda reply: None)

    def _make(self, frozen: Frozen, reply: BeginReply) -> AckRequest | None:
        participant, snapshot = self._participant, encoded(frozen.operator_state)
        saved = participant.save(self.epoch, reply, None, snapshot)
        if reply.base_due:  # it says that nothing before it is needed
            empty = encode_delta([], [])
            base = SlicePart(
                digest=empty.digest.hex(), size_bytes=len(empty.data), rows=0, data=empty.data
            )
            saved = replace(saved, base=base)
        return participant.ack(
            self._at, saved, frozen.attempt, AckTimes(), frozen.figures, self._report
        )

    def close(self, error: BaseException | None = None) -> None:
        """The subtask ends; may be called twice."""
        self._stop()
