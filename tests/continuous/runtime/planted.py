"""Planted bugs of a running job: each breaks one rule of its own code.

Not among them: a barrier that is sent while a request for a split is unanswered. What a driver says
to a slot comes in order, so the answer is always there first.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from snapshot.alignment import Alignment
from snapshot.barrier import Barrier
from snapshot.checkpoints import Subtask
from statebackend.continuous import driverlists, subtaskstate, takeover
from statebackend.continuous.driverlists import prepared_by
from statebackend.continuous.exchange.outbox import Outbox
from statebackend.continuous.job import JobRun
from statebackend.continuous.machine import RunMachine
from statebackend.continuous.output import Output
from statebackend.continuous.sinks import files
from statebackend.continuous.sinks.base import Prepared
from statebackend.continuous.sources.assigner import SplitAssigner
from statebackend.continuous.sources.base import Assignment
from statebackend.continuous.sourcetask import SourceSubtask
from statebackend.continuous.subtaskstate import SubtaskState
from statebackend.continuous.vertexstate import VertexState
from tests.continuous.runtime.trial import Trial

__all__ = ["BUGS", "SEVERAL", "Bug"]

Plant = Callable[[pytest.MonkeyPatch, Trial], None]


@dataclass(frozen=True)
class Bug:
    """One planted bug.

    Attributes:
        what: the rule, as it is broken.
        shows_in: how it may be seen from outside: wrong ``rows``, or a job that cannot go on
            (``error``, ``stuck``).
    """

    what: str
    plant: Plant
    shows_in: tuple[str, ...] = ("rows",)


# --- snapshots ------------------------------------------------------------------------------------


def _acked_before_durable(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    """A put that is still under way when the worker dies is lost."""
    really = subtaskstate.durable_slice

    def durable(store: Any, delta: Any, budget_bytes: int, name: str) -> Any:
        run = trial.runs
        part = really(_Nothing(), delta, budget_bytes, name)
        body = delta.data or b""

        def land() -> None:
            if trial.runs == run:
                store.put(name, [body])

        if part.name:
            threading.Timer(0.2, land).start()
        return part

    patch.setattr(subtaskstate, "durable_slice", durable)


class _Nothing:
    def put(self, name: str, parts: Any) -> None:
        pass


def _nothing_is_blocked(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    really = Alignment.__init__

    def init(self: Alignment, channels: int, **given: Any) -> None:
        really(self, channels, **{**given, "mode": "at_least_once"})

    patch.setattr(Alignment, "__init__", init)


def _aborted_layers_are_let_go(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    really = SubtaskState.aborted

    def aborted(self: SubtaskState, attempt: int) -> None:
        really(self, attempt)
        self._layers = [layer for layer in self._layers if layer[0] != attempt]

    patch.setattr(SubtaskState, "aborted", aborted)


def _confirmed_is_the_newest(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    """An attempt that was given up counts as complete for the state: its rows are let go."""
    really = SubtaskState.aborted

    def aborted(self: SubtaskState, attempt: int) -> None:
        self._confirmed_attempt = max(self._confirmed_attempt, attempt)
        really(self, attempt)

    patch.setattr(SubtaskState, "aborted", aborted)


def _barrier_overtakes_rows(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    """What is gathered for a channel goes after the barrier that came after it."""
    really = Outbox.send

    def send(self: Outbox, event: Any) -> None:
        if isinstance(event, Barrier):
            for buffer in self._buffers:
                buffer.unsent.append(event)
                buffer.pump()
            return
        really(self, event)

    patch.setattr(Outbox, "send", send)


# --- sources --------------------------------------------------------------------------------------


def _offsets_of_the_next_batch(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    really = SourceSubtask._snapshot_if_due

    def snapshot(self: SourceSubtask) -> None:
        if not self._due or self._unanswered:
            return
        early = [(one, one.reader.read(4096)) for one in self._open_splits]
        really(self)
        for one, batch in early:
            if batch is not None:
                self._times.took(one.id, batch, 0.0)
                self.output.emit(batch)

    patch.setattr(SourceSubtask, "_snapshot_if_due", snapshot)


def _positions_are_lost(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    really = driverlists.decode_assignment

    def decoded(id: str, state: str) -> Assignment:
        return msgspec.structs.replace(really(id, state), position=None)

    patch.setattr(driverlists, "decode_assignment", decoded)


def _restored_splits_are_lost(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    really = SplitAssigner.restore

    def restore(self: SplitAssigner, state: bytes | None, positions: Any) -> None:
        really(self, state, ())

    patch.setattr(SplitAssigner, "restore", restore)


def _what_nobody_had_is_lost(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    really = SplitAssigner.restore

    def restore(self: SplitAssigner, state: bytes | None, positions: Any) -> None:
        really(self, state, positions)
        if state is not None:
            fresh = [one for one in self._pending if one.position is None]
            for one in fresh[:1]:
                self._pending.remove(one)

    patch.setattr(SplitAssigner, "restore", restore)


def _handed_out_on_both_sides(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    """A split goes out after the cut to a subtask that has not passed the barrier."""
    really = SplitAssigner.request

    def request(self: SplitAssigner, subtask: int, number: int | None = None) -> Any:
        cuts, self._cuts = self._cuts, set()
        try:
            return really(self, subtask, number)
        finally:
            self._cuts = cuts

    patch.setattr(SplitAssigner, "request", request)


def _cut_when_it_is_written(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    """What is pending is looked at when all have acked, not when the barriers go out."""
    really = JobRun._write

    def write(self: JobRun, given: Any) -> Any:
        cuts = {}
        for uid, assigner in self._assigners.items():
            state = msgspec.json.decode(given.cuts[uid])
            left = {one.split.id for one in assigner.pending}
            state["pending"] = [one for one in state["pending"] if one["split"]["id"] in left]
            cuts[uid] = msgspec.json.encode(state)
        return really(self, dataclasses.replace(given, cuts=cuts))

    patch.setattr(JobRun, "_write", write)


# --- the driver -----------------------------------------------------------------------------------


def _parts_of_two_attempts(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    """A part that comes late, of an attempt that was given up, is taken for the next one's."""
    acked = RunMachine.acked

    def take_any(self: RunMachine, part: Any, now_s: float) -> Any:
        number = self._checkpoints.number
        ack = part.ack and msgspec.structs.replace(part.ack, attempt=number)
        return acked(self, msgspec.structs.replace(part, checkpoint=number, ack=ack), now_s)

    patch.setattr(RunMachine, "acked", take_any)


def _a_source_of_the_attempt_before(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    """Of one source's subtask a record has what it had for the attempt that was written before."""
    really = JobRun._write
    before: dict[Subtask, Any] = {}

    def write(self: JobRun, given: Any) -> Any:
        stale = {one: before.get(one, part) for one, part in given.parts.items() if not part.ack}
        before.update(given.parts)
        stale = {one: part for one, part in stale.items() if one.index}
        return really(self, dataclasses.replace(given, parts={**given.parts, **stale}))

    patch.setattr(JobRun, "_write", write)


def _an_epoch_of_one_record(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    """An epoch counts when the first of its vertices has its record."""

    def last(manifests: Any, operators: Any) -> int:
        found = takeover.last_epochs(manifests)
        return max((epoch for uid, epoch in found.items() if uid in operators), default=-1)

    patch.setattr(takeover, "_last_complete", last)


# --- sinks ----------------------------------------------------------------------------------------


def _prepared_is_not_repeated(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    def prepared(self: Prepared, checkpoint: int, committables: Any) -> list[bytes]:
        return list(committables)

    patch.setattr(Prepared, "prepared", prepared)


def _aborted_output_is_forgotten(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    """Committables of attempts that were given up are taken for committed."""
    really = Output.prepare

    def prepare(self: Output, checkpoint: int) -> dict[str, list[bytes]]:
        self.completed(checkpoint - 1)
        return really(self, checkpoint)

    patch.setattr(Output, "prepare", prepare)


def _prepared_one_late(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    """A checkpoint holds what the sink had prepared for the one before."""
    really = files._Writer.prepare

    def prepare(self: Any, checkpoint: int) -> list[bytes]:
        before = self.__dict__.get("late", [])
        self.__dict__["late"] = really(self, checkpoint)
        return before

    patch.setattr(files._Writer, "prepare", prepare)


def _swept_before_the_commit(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    really = files.FileSink.committer

    def committer(self: Any, job: str, uid: str) -> Any:
        made = really(self, job, uid)
        place, folder = made._place, made._folder
        for name in place.children(folder):
            if not name.startswith(files._COMMITTING):
                place.remove(f"{folder}/{name}")
        return made

    patch.setattr(files.FileSink, "committer", committer)


def _committed_before_the_record(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    really = JobRun._write

    def write(self: JobRun, given: Any) -> Any:
        for uid, prepared in prepared_by(given.parts).items():
            self._committers[uid].commit(prepared)
        return really(self, given)

    patch.setattr(JobRun, "_write", write)


def _not_committed_after_a_restore(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    really = driverlists.DriverLists.committables

    def none(self: Any) -> dict[str, list[bytes]]:
        return {uid: [] for uid in really(self)}

    patch.setattr(driverlists.DriverLists, "committables", none)


BUGS: dict[str, Bug] = {
    "acked before durable": Bug(
        "a subtask acks while its slice is still on its way to the store",
        _acked_before_durable,
        ("error",),
    ),
    "nothing is blocked": Bug(
        "rows behind an early barrier are in an exactly-once snapshot", _nothing_is_blocked
    ),
    "aborted layers are let go": Bug(
        "what was frozen for an attempt that was given up is in no later one",
        _aborted_layers_are_let_go,
        ("rows", "error"),
    ),
    "aborted is confirmed": Bug(
        "an attempt that was given up counts as complete in its subtask",
        _confirmed_is_the_newest,
        ("rows", "error"),
    ),
    "a barrier overtakes rows": Bug(
        "rows that were gathered before a barrier go after it", _barrier_overtakes_rows
    ),
    "offsets of the next batch": Bug(
        "a source's position is taken after a batch that goes behind the barrier",
        _offsets_of_the_next_batch,
    ),
    "positions are lost": Bug("a restored split is read from its start", _positions_are_lost),
    "restored splits are lost": Bug(
        "splits that were being read are not handed out again", _restored_splits_are_lost
    ),
    "a pending split is lost": Bug(
        "a split that nobody had is not restored", _what_nobody_had_is_lost
    ),
    "handed out on both sides": Bug(
        "a split is in the assigner's part of a checkpoint and in a subtask's",
        _handed_out_on_both_sides,
        ("rows", "error"),
    ),
    "cut when it is written": Bug(
        "splits that go out between a barrier and its record are in no part",
        _cut_when_it_is_written,
    ),
    "parts of two attempts": Bug(
        "late parts of an attempt that was given up are taken for the next one's",
        _parts_of_two_attempts,
        ("rows", "error", "stuck"),
    ),
    "a source of the attempt before": Bug(
        "one part of a checkpoint is of the attempt before",
        _a_source_of_the_attempt_before,
        ("rows", "error"),
    ),
    "an epoch of one record": Bug(
        "an epoch counts when the first of its vertices has its record",
        _an_epoch_of_one_record,
        ("rows", "error"),
    ),
    "prepared is not repeated": Bug(
        "output that an aborted attempt had prepared is in no later one", _prepared_is_not_repeated
    ),
    "aborted output is forgotten": Bug(
        "output of an aborted attempt is taken for committed", _aborted_output_is_forgotten
    ),
    "prepared one late": Bug(
        "a checkpoint holds what the sink prepared for the one before", _prepared_one_late
    ),
    "swept before the commit": Bug(
        "staged files go before those of the restored checkpoint are committed",
        _swept_before_the_commit,
        ("error",),
    ),
    "committed before the record": Bug(
        "output shows before its checkpoint is durable", _committed_before_the_record
    ),
    "not committed after a restore": Bug(
        "what the restored checkpoint had prepared is left, and swept",
        _not_committed_after_a_restore,
    ),
}


# --- several checkpoints under way at once --------------------------------------------------------


def _the_turn_is_not_waited_for(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    """A part is made for the epoch that the attempt before it is to be."""
    patch.setattr(VertexState, "_await_turn", VertexState._wanted)


def _confirmed_with_those_behind(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    """What was frozen for the attempts behind a complete one counts as durable with it."""
    really = SubtaskState._following

    def following(self: SubtaskState, attempt: int, epoch: int, chain: str) -> Any:
        found = really(self, attempt, epoch, chain)
        self._confirmed_attempt = max(number for number, _ in self._layers)
        return found

    patch.setattr(SubtaskState, "_following", following)


def _output_of_those_behind_is_forgotten(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    """With a complete checkpoint's output that of later attempts is taken for committed."""
    really = Output.completed

    def completed(self: Output, checkpoint: int) -> None:
        really(self, checkpoint + 16)

    patch.setattr(Output, "completed", completed)


def _held_back_for_the_oldest_cut(patch: pytest.MonkeyPatch, trial: Trial) -> None:
    """A split goes to a subtask that has passed the oldest barrier, and not the newest."""

    def waits(self: SplitAssigner, subtask: int) -> bool:
        return bool(self._pending) and self._passed[subtask] < min(self._cuts, default=-1)

    patch.setattr(SplitAssigner, "waits_for_barrier", waits)


SEVERAL: dict[str, Bug] = {
    "the turn is not waited for": Bug(
        "a part is made while the attempt before it may be complete or given up",
        _the_turn_is_not_waited_for,
        ("rows", "error", "stuck"),
    ),
    "confirmed with those behind": Bug(
        "what was frozen for a later attempt is taken for durable with an earlier one",
        _confirmed_with_those_behind,
        ("rows", "error"),
    ),
    "output of those behind is forgotten": Bug(
        "what was prepared for a later attempt is taken for committed with an earlier one",
        _output_of_those_behind_is_forgotten,
    ),
    "held back for the oldest cut": Bug(
        "a split is handed out after a cut that its subtask has not passed",
        _held_back_for_the_oldest_cut,
        ("rows", "error"),
    ),
}
