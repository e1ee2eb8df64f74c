"""What the planted bugs of continuous jobs change: each breaks one rule of its own code."""

from __future__ import annotations

from typing import Any

from snapshot.barriers import channel_watermarks as watermarks
from snapshot.barriers.alignment import Alignment
from snapshot.barriers.barrier import Watermark
from snapshot.formats.record import LOG_PREFIX
from snapshot.retention import garbage_collection as cleaning
from snapshot.storage.counting_store import CountingStore
from statebackend.continuous.driver import job_from_savepoint as beginning
from statebackend.continuous.driver import savepoint_requests as saving
from statebackend.continuous.driver.savepoint_requests import SavepointRequests
from statebackend.continuous.exchange.outbox import Outbox
from statebackend.continuous.worker.keyed_subtask import KeyedSubtask
from statebackend.continuous.worker.subtask_output import Output
from statebackend.errors import StorageError
from statebackend.runtime.worker.operator_state_io import OperatorStateIO
from statebackend.state.streaming_timers import StreamingTimers
from tests.planted.bug import Patches
from tests.sim.continuous import beside

__all__ = [
    "a_savepoint_is_what_was_there",
    "a_sink_that_failed_declines",
    "cleaning_goes_over_other_jobs",
    "lists_are_forgotten",
    "nothing_is_blocked_behind",
    "positions_stay_behind",
    "prepared_output_is_taken_over",
    "sinks_are_not_waited_for",
    "the_fastest_channel_counts",
    "timers_set_before_are_not_seen",
    "watermarks_overtake_rows",
]


def lists_are_forgotten() -> Patches:
    """What an operator's lists held is not given back; broadcast maps are."""
    really = OperatorStateIO.read

    def read(self: OperatorStateIO, reply: Any) -> Any:
        found = really(self, reply)
        return type(found)({}, found.maps) if self.operator == "op" else found

    yield OperatorStateIO, "read", read


# --- event time -----------------------------------------------------------------------------------


def the_fastest_channel_counts() -> Patches:
    """The watermark is the largest over the channels."""

    def largest(held: Any, *, default: int) -> int:
        return max(held, default=default)

    yield watermarks, "min", largest


def watermarks_overtake_rows() -> Patches:
    """A watermark goes ahead of the rows that are gathered for a channel."""
    really = Outbox.send

    def send(self: Outbox, event: Any) -> None:
        if not isinstance(event, Watermark):
            really(self, event)
            return
        for buffer in self._buffers:
            buffer.unsent.append(event)
            buffer.pump()

    yield Outbox, "send", send


def timers_set_before_are_not_seen() -> Patches:
    """A restored subtask takes what is set in its store for fired."""

    def look(self: StreamingTimers, key_groups: range) -> None:
        self._new_due(key_groups, 2**64 - 2)

    yield StreamingTimers, "look", look


# --- sinks ----------------------------------------------------------------------------------------


def sinks_are_not_waited_for() -> Patches:
    """A checkpoint is acked when its output was begun."""
    yield Output, "await_prepared", lambda self, checkpoint: None


def a_sink_that_failed_declines() -> Patches:
    """A sink that lost rows on their way costs a checkpoint, and not the run."""
    really = KeyedSubtask._await_output

    def await_output(self: KeyedSubtask, checkpoint: int) -> float | None:
        try:
            return really(self, checkpoint)
        except StorageError as error:
            self._declined(checkpoint, str(error))
            return None

    yield KeyedSubtask, "_await_output", await_output


# --- several operators in a row -------------------------------------------------------------------


def nothing_is_blocked_behind() -> Patches:
    """Rows behind an early barrier are in the snapshot of an operator that another one feeds."""
    really = KeyedSubtask.__init__

    def init(self: KeyedSubtask, *given: Any, **more: Any) -> None:
        really(self, *given, **more)
        if self.vertex == "again":
            in_order = [c for c, edge in enumerate(self._inputs) if not edge.key_positions]
            self._alignment = Alignment(len(self._inputs), mode="at_least_once", in_order=in_order)

    yield KeyedSubtask, "__init__", init


# --- savepoints -----------------------------------------------------------------------------------


def positions_stay_behind() -> Patches:
    """A job that begins with a savepoint has its state, and reads its sources from their start."""
    really = beginning.without

    def without(saved: Any, uids: Any) -> Any:
        return really(saved, list(beginning.lists_in(saved)))

    yield beginning, "without", without


def prepared_output_is_taken_over() -> Patches:
    """What a savepoint's sinks had prepared is the new job's to commit as well."""

    def without(saved: Any, uids: Any) -> Any:
        return saved

    yield beginning, "without", without


def a_savepoint_is_what_was_there() -> Patches:
    """It does not wait for a checkpoint of its own: the log has complete ones."""
    really = SavepointRequests._cut

    def cut(self: SavepointRequests, kind: Any, held: Any, deadline: Any) -> Any:
        manifests = self._job.log().manifests()
        if not any(m.kind == "checkpoint" for m in manifests):
            return really(self, kind, held, deadline)
        return saving._Cut(max(0, saving.complete_epoch(manifests) - 1), manifests)

    yield SavepointRequests, "_cut", cut


# --- other jobs -----------------------------------------------------------------------------------


def cleaning_goes_over_other_jobs() -> Patches:
    """Objects in another job's folder are taken for the job's own, which no record of it names."""

    class Wide(CountingStore):
        def list(self, prefix: str) -> Any:
            own = super().list(prefix)
            found = [] if prefix == LOG_PREFIX else super().list(beside.FOLDER + prefix)
            cut = len(beside.FOLDER)
            self.others = {one.name[cut:] for one in found} | getattr(self, "others", set())
            return [*own, *(type(o)(o.name[cut:], o.size_bytes, o.modified_ms) for o in found)]

        def delete(self, names: Any) -> None:
            super().delete([beside.FOLDER + n if n in self.others else n for n in names])

    yield cleaning, "CountingStore", Wide
