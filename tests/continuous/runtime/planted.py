"""What a planted bug changes in a running job: each breaks one rule of its own code.

Not among them: a barrier that is sent while a request for a split is unanswered. What a driver says
to a slot comes in order, so the answer is always there first.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import msgspec

from snapshot.barriers.alignment import Alignment
from snapshot.barriers.barrier import Barrier
from snapshot.barriers.pending_checkpoints import Subtask
from statebackend.continuous.driver import driver_lists as driverlists
from statebackend.continuous.driver import takeover
from statebackend.continuous.driver.driver_lists import prepared_by
from statebackend.continuous.driver.run_loop import JobRun
from statebackend.continuous.driver.run_state import RunState
from statebackend.continuous.exchange.outbox import Outbox
from statebackend.continuous.sinks import file_sink as files
from statebackend.continuous.sinks.committables import Prepared
from statebackend.continuous.sources.split_assigner import SplitAssigner
from statebackend.continuous.sources.split_assignment import Assignment
from statebackend.continuous.worker.checkpointed_state import CheckpointedState
from statebackend.continuous.worker.keyed_state import SubtaskState
from statebackend.continuous.worker.source_subtask import SourceSubtask
from statebackend.continuous.worker.subtask_output import Output
from statebackend.runtime.worker import participant
from tests.continuous.runtime.world import ThreadCluster
from tests.planted.bug import Patches

# --- snapshots ------------------------------------------------------------------------------------


def acked_before_durable() -> Patches:
    """A put that is still under way when the worker dies is lost."""
    really, really_started = participant.durable_slice, ThreadCluster.stage
    runs = 0

    def stage(self: ThreadCluster, run: Any, credentials: Any) -> Any:
        nonlocal runs
        runs += 1
        return really_started(self, run, credentials)

    def durable(store: Any, delta: Any, budget_bytes: int, name: str) -> Any:
        run = runs
        part = really(_Nothing(), delta, budget_bytes, name)
        body = delta.data or b""

        def land() -> None:
            if runs == run:
                store.put(name, [body])

        if part.name:
            threading.Timer(0.2, land).start()
        return part

    yield ThreadCluster, "stage", stage
    yield participant, "durable_slice", durable


class _Nothing:
    def put(self, name: str, parts: Any) -> None:
        pass


def nothing_is_blocked() -> Patches:
    really = Alignment.__init__

    def init(self: Alignment, channels: int, **given: Any) -> None:
        really(self, channels, **{**given, "mode": "at_least_once"})

    yield Alignment, "__init__", init


def aborted_layers_are_let_go() -> Patches:
    really = SubtaskState.aborted

    def aborted(self: SubtaskState, attempt: int) -> None:
        really(self, attempt)
        layers = self._layers
        layers._layers = [layer for layer in layers._layers if layer[0] != attempt]

    yield SubtaskState, "aborted", aborted


def confirmed_is_the_newest() -> Patches:
    """An attempt that was given up counts as complete for the state: its rows are let go."""
    really = SubtaskState.aborted

    def aborted(self: SubtaskState, attempt: int) -> None:
        self._layers.confirmed = max(self._layers.confirmed, attempt)
        really(self, attempt)

    yield SubtaskState, "aborted", aborted


def barrier_overtakes_rows() -> Patches:
    """What is gathered for a channel goes after the barrier that came after it."""
    really = Outbox.send

    def send(self: Outbox, event: Any) -> None:
        if isinstance(event, Barrier):
            for buffer in self._buffers:
                buffer.unsent.append(event)
                buffer.pump()
            return
        really(self, event)

    yield Outbox, "send", send


# --- sources --------------------------------------------------------------------------------------


def offsets_of_the_next_batch() -> Patches:
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

    yield SourceSubtask, "_snapshot_if_due", snapshot


def positions_are_lost() -> Patches:
    really = driverlists.decode_assignment

    def decoded(id: str, state: str) -> Assignment:
        return msgspec.structs.replace(really(id, state), position=None)

    yield driverlists, "decode_assignment", decoded


def restored_splits_are_lost() -> Patches:
    really = SplitAssigner.restore

    def restore(self: SplitAssigner, state: bytes | None, positions: Any) -> None:
        really(self, state, ())

    yield SplitAssigner, "restore", restore


def what_nobody_had_is_lost() -> Patches:
    really = SplitAssigner.restore

    def restore(self: SplitAssigner, state: bytes | None, positions: Any) -> None:
        really(self, state, positions)
        if state is not None:
            fresh = [one for one in self._pending if one.position is None]
            for one in fresh[:1]:
                self._pending.remove(one)

    yield SplitAssigner, "restore", restore


def handed_out_on_both_sides() -> Patches:
    """A split goes out after the cut to a subtask that has not passed the barrier."""
    really = SplitAssigner.request

    def request(self: SplitAssigner, subtask: int, number: int | None = None) -> Any:
        cuts, self._cuts = self._cuts, set()
        try:
            return really(self, subtask, number)
        finally:
            self._cuts = cuts

    yield SplitAssigner, "request", request


def cut_when_it_is_written() -> Patches:
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

    yield JobRun, "_write", write


# --- the driver -----------------------------------------------------------------------------------


def parts_of_two_attempts() -> Patches:
    """A part that comes late, of an attempt that was given up, is taken for the next one's."""
    acked = RunState.acked

    def take_any(self: RunState, part: Any, now_s: float) -> Any:
        number = self._checkpoints.number
        ack = part.ack and msgspec.structs.replace(part.ack, attempt=number)
        return acked(self, msgspec.structs.replace(part, checkpoint=number, ack=ack), now_s)

    yield RunState, "acked", take_any


def a_source_of_the_attempt_before() -> Patches:
    """Of one source's subtask a record has what it had for the attempt that was written before."""
    really = JobRun._write
    before: dict[Subtask, Any] = {}

    def write(self: JobRun, given: Any) -> Any:
        stale = {one: before.get(one, part) for one, part in given.parts.items() if not part.ack}
        before.update(given.parts)
        stale = {one: part for one, part in stale.items() if one.index}
        return really(self, dataclasses.replace(given, parts={**given.parts, **stale}))

    yield JobRun, "_write", write


def an_epoch_of_one_record() -> Patches:
    """An epoch counts when the first of its vertices has its record."""

    def last(manifests: Any, operators: Any) -> int:
        found = takeover.last_epochs(manifests)
        return max((epoch for uid, epoch in found.items() if uid in operators), default=-1)

    yield takeover, "_last_complete", last


# --- sinks ----------------------------------------------------------------------------------------


def prepared_is_not_repeated() -> Patches:
    def prepared(self: Prepared, checkpoint: int, committables: Any) -> list[bytes]:
        return list(committables)

    yield Prepared, "prepared", prepared


def aborted_output_is_forgotten() -> Patches:
    """Committables of attempts that were given up are taken for committed."""
    really = Output.prepare

    def prepare(self: Output, checkpoint: int) -> dict[str, list[bytes]]:
        self.completed(checkpoint - 1)
        return really(self, checkpoint)

    yield Output, "prepare", prepare


def prepared_one_late() -> Patches:
    """A checkpoint holds what the sink had prepared for the one before."""
    really = files._Writer.prepare

    def prepare(self: Any, checkpoint: int) -> list[bytes]:
        before = self.__dict__.get("late", [])
        self.__dict__["late"] = really(self, checkpoint)
        return before

    yield files._Writer, "prepare", prepare


def swept_before_the_commit() -> Patches:
    really = files.FileSink.committer

    def committer(self: Any, job: str, uid: str) -> Any:
        made = really(self, job, uid)
        place, folder = made._place, made._folder
        for name in place.children(folder):
            if not name.startswith(files._COMMITTING):
                place.remove(f"{folder}/{name}")
        return made

    yield files.FileSink, "committer", committer


def committed_before_the_record() -> Patches:
    really = JobRun._write

    def write(self: JobRun, given: Any) -> Any:
        for uid, prepared in prepared_by(given.parts).items():
            self._committers[uid].commit(prepared)
        return really(self, given)

    yield JobRun, "_write", write


def not_committed_after_a_restore() -> Patches:
    really = driverlists.DriverLists.committables

    def none(self: Any) -> dict[str, list[bytes]]:
        return {uid: [] for uid in really(self)}

    yield driverlists.DriverLists, "committables", none


# --- several checkpoints under way at once --------------------------------------------------------


def the_turn_is_not_waited_for() -> Patches:
    """A part is made for the epoch that the attempt before it is to be."""
    yield CheckpointedState, "_await_turn", CheckpointedState._wanted


def confirmed_with_those_behind() -> Patches:
    """What was frozen for the attempts behind a complete one counts as durable with it."""
    really = SubtaskState._confirm

    def confirm(self: SubtaskState, attempt: int, chain: str) -> Any:
        found = really(self, attempt, chain)
        self._layers.confirmed = max(number for number, _ in self._layers._layers)
        return found

    yield SubtaskState, "_confirm", confirm


def output_of_those_behind_is_forgotten() -> Patches:
    """With a complete checkpoint's output that of later attempts is taken for committed."""
    really = Output.completed

    def completed(self: Output, checkpoint: int) -> None:
        really(self, checkpoint + 16)

    yield Output, "completed", completed


def held_back_for_the_oldest_cut() -> Patches:
    """A split goes to a subtask that has passed the oldest barrier, and not the newest."""

    def waits(self: SplitAssigner, subtask: int) -> bool:
        return bool(self._pending) and self._passed[subtask] < min(self._cuts, default=-1)

    yield SplitAssigner, "waits_for_barrier", waits
