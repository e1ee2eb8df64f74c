"""What every subtask of a continuous job has: a mailbox, an output, a thread, its driver."""

from __future__ import annotations

import logging
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from snapshot.barriers.barrier import EndOfInput, Watermark
from snapshot.barriers.channel_watermarks import END_MS
from statebackend.continuous.job.slot_messages import (
    Acked,
    AtEnd,
    Command,
    Declined,
    Running,
    Trigger,
)
from statebackend.continuous.job.slot_messages import Event as Happened
from statebackend.continuous.worker.overtaken_rows import (
    ChannelQueue,
    Overtaken,
    Place,
    batches_of,
    check_lane,
)
from statebackend.continuous.worker.subtask_output import Output
from statebackend.errors import (
    PeerLostError,
    ProcessorError,
    StaleRequestError,
    StateBackendError,
)
from statebackend.system import SYSTEM, System
from statebackend.threads import Queue

__all__ = ["NAP_S", "Link", "Subtask", "stopped"]

_log = logging.getLogger("statebackend.continuous")

_HEARD_S: Final = 5.0  # how long a subtask waits to hear how the run has ended
NAP_S: Final = 0.02
"""How long the mailbox waits at most while nothing arrives, or nothing can be sent."""


class Link(Protocol):
    """How a subtask reaches its driver, and whom it tells that it cannot go on."""

    def report(self, *events: Happened) -> None:
        """Say what happened; raises if the driver cannot be reached."""

    def broken(
        self, vertex: str, subtask: int, error: BaseException, *, closing: bool = False
    ) -> bool:
        """The subtask has failed; whether the run was over anyway."""


def stopped() -> StateBackendError:
    """What wakes a thread that is to end; nobody is told of it."""
    return PeerLostError("The run is over.")


class Subtask(ABC):
    """What all subtasks have: a mailbox, an output, a thread that runs them.

    Args:
        place: which it is. output: connects it to where its rows go. link: to the driver.
    """

    def __init__(
        self,
        place: Place,
        output: Callable[[], Output],
        link: Link,
        system: System = SYSTEM,
    ) -> None:
        self._place, self._system = place, system
        self.vertex, self.index = place.vertex, place.subtask
        self._overtaken: list[Overtaken] = []  # to be put back into the output
        self._connect, self._link = output, link
        self._output: Output | None = None
        self.mailbox: Queue[Command] = system.threads.queue()
        self._stopping = self._job_ended = self._failed = False
        self._stopped = system.threads.event()
        self._last: int | None = None  # the attempt that is the job's last
        self._at_end = False

    def run(self) -> None:
        """In a thread of its own: to the end of the run; failures are told, not raised."""
        error: BaseException | None = None
        stopped = True
        try:
            self._open()
            self._output = self._connect()
            self._put_back()
            self._link.report(Running(vertex=self.vertex, subtask=self.index))
            while not self._stopping:
                self._step()
        except BaseException as caught:
            error, self._failed = caught, True
            over = self._stopping or self._link.broken(self.vertex, self.index, caught)
            # What others' ends look like, and the driver's when its run is over.
            stopped = over and isinstance(caught, PeerLostError | StaleRequestError)
            if stopped:
                self._stopped.wait(_HEARD_S)
        finally:
            self._stopping = True
            self._finish(error, stopped=stopped)

    def stop(self, *, job_ended: bool = False) -> None:
        """Ends it soon, from any thread. ``job_ended``: a failure to close is reported."""
        self._job_ended = job_ended
        self._stopping = True
        self._stopped.set()
        output = self._output
        if output is not None:
            output.fail(stopped())

    @property
    def output(self) -> Output:
        """Where the rows go, once it is connected."""
        assert self._output is not None
        return self._output

    def _put_back(self) -> None:
        """What lay in the output when the restored snapshot was taken."""
        found = [(one.lane, batches_of(self.vertex, one)) for one in self._overtaken]
        self.output.put_back(found)
        self._overtaken = []

    def _check_overtaken(
        self, overtaken: Iterable[Overtaken], known: Iterable[ChannelQueue]
    ) -> None:
        lanes = frozenset(known)
        for one in overtaken:
            check_lane(self._place, one, lanes)

    def _finish(self, error: BaseException | None, *, stopped: bool) -> None:
        """Let go of everything; a failure to do so is reported only if the job has ended."""
        for close in (
            lambda: self._close(error, stopped=stopped),
            self._output.close if self._output else None,
        ):
            try:
                if close is not None:
                    close()
            except Exception as failed:
                _log.warning("%s/%d was not closed in order: %s", self.vertex, self.index, failed)
                if self._job_ended and stopped:
                    known = self._not_closed(failed)
                    self._link.broken(self.vertex, self.index, known, closing=True)

    def _not_closed(self, failed: Exception) -> StateBackendError:
        kind: type[StateBackendError] = ProcessorError
        what = f"Closing it raised {type(failed).__name__}: {failed}"
        if isinstance(failed, StateBackendError):
            kind, what = type(failed), failed.what
        known = kind(
            f"Subtask {self.index} of {self.vertex!r} was not closed in order at the job's end: "
            f"{what.removesuffix('.')}.",
            todo="All output is committed. Mend what does not close; the next start closes it "
            "again.",
        )
        known.__cause__ = failed
        return known

    def _mail(self, wait_s: float = 0.0) -> bool:
        """Do what the driver said, and not what it says meanwhile; whether it said anything."""
        found = False
        for _ in range(max(1, self.mailbox.qsize())):  # else checkpoint on checkpoint, and no rows
            if self._stopping:
                return found
            try:
                command = self.mailbox.get(timeout=wait_s) if wait_s else self.mailbox.get_nowait()
            except queue.Empty:
                return found
            found, wait_s = True, 0.0
            if isinstance(command, Trigger) and command.barrier.kind == "last":
                self._last = command.barrier.checkpoint
            self._on_command(command)
        return found

    def _ended(self) -> None:
        """The input has ended: so do the channels."""
        self.output.send(Watermark(at_ms=END_MS))
        self.output.send(EndOfInput())
        self._at_end = True
        self._report(AtEnd(vertex=self.vertex, subtask=self.index))

    def _report(self, event: Happened) -> None:
        """Say what happened to the driver."""
        self._link.report(event)

    def _await_output(self, checkpoint: int) -> float | None:
        """Wait until the sinks' rows of a checkpoint are safe, in another thread than theirs.

        Returns:
            Milliseconds that it took; None: the subtask has failed, and acks nothing more. A sink
            may have told the thread that writes that it lost rows, and tell nobody else.
        """
        started_s = self._system.monotonic_s()
        self.output.await_prepared(checkpoint)
        if self._failed:
            return None
        return round((self._system.monotonic_s() - started_s) * 1000, 3)

    def _acked(self, checkpoint: int, **parts: Any) -> None:
        ended = self._at_end and checkpoint == self._last
        self._report(
            Acked(
                vertex=self.vertex,
                subtask=self.index,
                checkpoint=checkpoint,
                ended=ended,
                **parts,
            )
        )

    def _declined(self, checkpoint: int, why: str, *, newer: bool = False) -> None:
        declined = Declined(
            vertex=self.vertex, subtask=self.index, checkpoint=checkpoint, newer=newer, why=why
        )
        self._link.report(declined)

    @abstractmethod
    def _open(self) -> None:
        """Get the state, before anything else."""

    @abstractmethod
    def _step(self) -> None:
        """Do a little, or wait a little."""

    @abstractmethod
    def _on_command(self, command: Command) -> None:
        """Do what the driver said."""

    @abstractmethod
    def _close(self, error: BaseException | None, *, stopped: bool) -> None:
        """Let go of what was opened; ``stopped``: nothing failed here."""
