"""The records of a run: which is due, what it says, and what follows when it is durable."""

from __future__ import annotations

from snapshot.formats.record import Manifest
from snapshot.protocol.operators import CommitWork, operators_setting
from snapshot.protocol.record_assembly import assemble
from snapshot.protocol.running_job import RunningJob
from statebackend.errors import ProtocolError

__all__ = ["RecordCommits"]


class RecordCommits:
    """Of all operators of a run."""

    def __init__(self, run: RunningJob) -> None:
        self._run = run

    def take_due(self, uid: str, epoch: int) -> CommitWork | None:
        """The record that must be written now for an operator; None where nothing is due.

        With synchronous commits no other epoch may begin between this and :meth:`committed`: the
        caller holds a lock. In any case records are written in the order in which they were due.
        """
        run = self._run
        run.check_alive()
        operator = run.operators[uid]
        if epoch != run.epoch or run.stamps.current is None:
            return None
        acks = operator.epoch.take_due()
        if acks is None:
            return None
        head = Manifest(
            kind="checkpoint",
            generation=0,  # this and the next three are filled in when it is appended
            sequence=0,
            writer="",
            write_id="",
            job=run.job,
            job_id=run.job_id,
            query_id=run.query_id,
            run=run.name,
            operator=uid,
            epoch=run.epoch,
            stamp_ms=run.stamps.current,
            watermark_ms=self._watermark_ms,
            oldest_needed=self._oldest_needed(),
            settings=operators_setting(
                {one: running.lineage.first_epoch for one, running in run.operators.items()},
                [one for one, running in run.operators.items() if running.spec.initial],
            ),
        )
        return assemble(
            operator.filled(head, acks),
            acks,
            operator.bases.take(),
            [subtask.key_groups for subtask in operator.lineage.subtasks],
        )

    @property
    def _watermark_ms(self) -> int | None:
        """What records say: nothing in a job that has never had a watermark."""
        timed = any(spec.time_mode == "event" for spec in self._run.specs.values())
        watermark_ms = self._run.time.watermark_ms
        return watermark_ms if timed or watermark_ms else None

    def _oldest_needed(self) -> int:
        assert self._run.epoch is not None
        needed = [one.oldest_needed(self._run.epoch) for one in self._run.operators.values()]
        return min((sequence for sequence in needed if sequence is not None), default=0)

    def check_follows(self, work: CommitWork) -> None:
        """Refuse to write a record whose epoch does not follow what the log holds.

        Raises:
            ProtocolError: it would make a gap that no restart could get over.
        """
        lineage = self._run.operators[work.operator].lineage
        if any(subtask.chain_at(work.epoch - 1) is None for subtask in lineage.subtasks):
            raise ProtocolError(
                f"The record of operator {work.operator!r} for epoch {work.epoch} would leave a "
                f"gap: epoch {work.epoch - 1} is not in the log.",
                todo="Start again: the query goes back to what the log holds.",
            )

    def committed(self, work: CommitWork, manifest: Manifest) -> None:
        """The record of ``work`` is durable; ``manifest`` as written (sequence and offsets)."""
        assert self._run.epoch is not None
        self._run.operators[work.operator].committed(self._run.epoch, work, manifest)
