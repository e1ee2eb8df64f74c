"""Epochs run where their store is open, whichever worker Spark gave the task to.

Spark hands its idle Python workers to tasks in any order: in about every second batch two tasks of
an executor find each other's store with the other. To hand the stores over costs a flush each, a
small file that every read has to look into, and in the end a merge of the whole store. So the rows
go to the store instead, if that is not small: the worker that was given the task (the *caller*)
passes its input on to the one that has the store open (the *callee*), which runs the epoch in a
thread, as the caller's attempt, and sends the output back. That is a *delegated epoch*.

A worker takes a delegated epoch only while its own task is delegated too, and its own task ends
after that epoch has. A worker whose own task was not taken waits for the epoch that it runs for
another. So one process computes one epoch at a time, and Spark does not end a worker as idle that
runs one. In all other cases the store is handed over (see :mod:`recovery.local.store_pool`). That
is a matter of speed alone: leases, fencing and acks are those of any attempt.

A delegated epoch goes on after a batch of output only when the caller's Spark has taken it, as a
task of the process's own does, and it ends when the caller closes the connection. Caller and callee
tell each other every few seconds that they run. A frozen callee is given up by its caller, and a
frozen caller by its callee, whose own task could not end before. In both cases the caller's task
fails and is tried again. Nobody waits in a circle: a delegated epoch needs its caller's input and
hands, which the caller's main thread gives until the epoch ends.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import logging
import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import ClassVar, Final

import pyarrow as pa

from recovery.local.local_sockets import Listener
from recovery.local.store_pool import StorePool
from statebackend import system
from statebackend.errors import PeerLostError, ProtocolError
from statebackend.rpc.envelope import encode
from statebackend.rpc.session_endpoint import Endpoint
from statebackend.spark.worker.batch_context import EpochContext
from statebackend.spark.worker.delegation_messages import (
    ConnectionClosed,
    Failed,
    Frames,
    Request,
)

__all__ = ["DelegatedEpochs", "Run", "pass_on"]

_log = logging.getLogger("statebackend.task")

_SOCKET: Final = "guests"  # beside the hand-over socket of a worker
_TICK_S: Final = 0.5
_TURN_S: Final = 0.0001
_ANSWER_S: Final = 0.5  # for the answer to a request
# What a callee takes of that, until its own task begins, and until that has read who it is.
_BEGIN_S: Final = 0.01
_MEET_S: Final = 0.1
_KNOWN_RUNS: Final = 16
_LEAVE_S: Final = 5.0
# Caller and callee say every few seconds that they run, also while they compute. Who is silent for
# `_SILENCE_S` is taken for frozen, even if a library only keeps the interpreter from other threads
# for so long.
_ALIVE_S: Final = 5.0
_SILENCE_S: Final = 60.0


Run = Callable[[Request, Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""Runs an epoch, from its input to its output. The input is read to its end first."""


class _Own(Enum):
    """Where this process's own task is."""

    NONE = 1
    LOOKING = 2
    HERE = 3
    AWAY = 4


class DelegatedEpochs:
    """A worker's part in it: one per process, made anew after a fork."""

    _instance: ClassVar[tuple[int, DelegatedEpochs] | None] = None
    _making: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, store_pool: StorePool) -> None:
        self._store_pool = store_pool
        self._runs: OrderedDict[tuple[str, str], Run] = OrderedDict()
        self._changed = threading.Condition()
        self._own = _Own.NONE
        self._context = contextvars.copy_context()
        self._delegated: tuple[threading.Thread, Frames] | None = None
        self._callee: Frames | None = None  # of this process's task
        self._closed = threading.Event()
        self._pool_address = store_pool.address
        path = Path(self._pool_address).with_name(_SOCKET)
        self._listener = Listener(path, "looked for a callee", tick_s=_TICK_S, closed=self._closed)
        self._thread = threading.Thread(
            target=self._serve, name="statebackend-hosting", daemon=True
        )
        self._thread.start()

    @classmethod
    def of_process(cls, store_pool: StorePool) -> DelegatedEpochs:
        """This process's."""
        with cls._making:
            known = cls._instance
            found = known[1] if known is not None and known[0] == os.getpid() else None
            if found is not None and found._pool_address == store_pool.address:
                return found
            try:
                made = cls(store_pool)
            except OSError:  # that folder was deleted, too, or the disk is full
                if found is None:
                    raise
                return found  # it is not found by others; the next task tries again
            if found is None:
                # Before the store pool lets its stores go: a delegated epoch has one open.
                atexit.register(_at_exit, os.getpid())
            else:
                found.close()
            cls._instance = (os.getpid(), made)
            return made

    @contextlib.contextmanager
    def task(self, endpoint: Endpoint, uid: str, run: Run) -> Iterator[None]:
        """While this process has a task of its own.

        Args:
            run: runs delegated epochs of the same operator and session here, from now on.
        """
        key = (endpoint.to_property(), uid)
        with self._changed:
            # It holds on to the processor's constants: one of an operator is enough.
            for known in [one for one in self._runs if one[1] == uid and one != key]:
                del self._runs[known]
            self._runs[key] = run
            self._runs.move_to_end(key)
            while len(self._runs) > _KNOWN_RUNS:
                self._runs.popitem(last=False)
            # What the user's modules have set for decimals holds for delegated epochs, too.
            self._context = contextvars.copy_context()
        self._goes(_Own.LOOKING)
        try:
            yield
        finally:
            self._callee = None
            self._goes(_Own.NONE)
            self._wait_for_delegated()

    def _goes(self, where: _Own) -> None:
        with self._changed:
            self._own = where
            self._changed.notify_all()

    def _wait_for_delegated(self) -> None:
        """Wait until this process runs no delegated epoch."""
        with self._changed:
            self._changed.wait_for(lambda: self._delegated is None)

    def close(self) -> None:
        """Take no delegated epoch any more, and end the one that runs."""
        self._closed.set()
        with self._changed:
            delegated = self._delegated
        if delegated is not None:
            delegated[1].hang_up()
            delegated[0].join(_LEAVE_S)
        self._listener.wake()
        self._thread.join(10 * _TICK_S)
        self._listener.close()

    # --- the callee's side -----------------------------------------------------------------------

    def _serve(self) -> None:
        said_s = system.monotonic_s()
        while not self._closed.is_set():
            if (now_s := system.monotonic_s()) - said_s >= _ALIVE_S:
                said_s = now_s
                self.say_alive()
            caller = self._listener.accept()
            if caller is None:
                continue
            frames = Frames(caller)
            delegated = threading.Thread(
                target=self._receive, args=(frames,), name="statebackend-delegated", daemon=True
            )
            try:
                delegated.start()
            except RuntimeError as error:  # no more threads
                _log.warning("a worker that looked for a callee was missed (%s)", error)
                frames.hang_up()

    def say_alive(self) -> None:
        """Send a sign of life to the caller and to the callee that this process has."""
        with self._changed:
            others = (self._delegated[1] if self._delegated else None), self._callee
        for other in others:
            if other is not None:
                other.alive()

    def _receive(self, frames: Frames) -> None:
        with frames, contextlib.suppress(ConnectionClosed, ProtocolError):
            frames.timeout_s = _TICK_S
            request = Request.read(frames.text())
            run = self._admitted(request, frames)
            if run is None:
                frames.send_flag(False)
                return
            try:
                frames.send_flag(True)
                frames.timeout_s = _SILENCE_S
                self._context.run(_accompany, run, request, frames)
            finally:
                with self._changed:
                    self._delegated = None
                    self._changed.notify_all()

    def _admitted(self, request: Request, frames: Frames) -> Run | None:
        if (request.executor, request.daemon) != (system.executor_name(), os.getppid()):
            return None  # another executor's memory, and another one's account
        path = Path(request.store_path)
        if not self._store_pool.keeps(path, request.at_least_bytes):
            return None  # at once: nothing that follows would change it
        with self._changed:
            # Tasks of a stage begin within milliseconds of each other; where no other one begins,
            # this one is not to wait for it in every batch.
            self._changed.wait_for(lambda: self._own is not _Own.NONE, timeout=_BEGIN_S)
            self._changed.wait_for(lambda: self._own is not _Own.LOOKING, timeout=_MEET_S)
            run = self._runs.get((request.endpoint, request.uid))
            if self._own is not _Own.AWAY or run is None:
                return None
            if self._delegated is not None or self._closed.is_set():
                return None
            if not self._store_pool.keeps(path):  # it may have been let go meanwhile
                return None
            self._delegated = (threading.current_thread(), frames)
        return run

    # --- the caller's side -----------------------------------------------------------------------

    def host_of(
        self,
        kept: tuple[Path, str] | None,
        uid: str,
        context: EpochContext,
        *,
        at_least_bytes: int,
    ) -> Frames | None:
        """A connection to the worker that runs this process's task; None: it is run here.

        Args:
            kept: its store, and the hand-over socket of the process that keeps it open; or None.
            at_least_bytes: of the store; a smaller one is handed over.
        """
        if kept is not None:
            self._goes(_Own.AWAY)
            request = Request.of(uid, kept[0], context, at_least_bytes)
            callee = _call(kept[1], request, answer_s=_ANSWER_S, silence_s=_SILENCE_S)
            if callee is not None:
                self._callee = callee
                return callee
        self._goes(_Own.HERE)
        self._wait_for_delegated()  # one was let in while this one asked
        return None


def _call(
    address_of_pool: str, request: Request, *, answer_s: float, silence_s: float
) -> Frames | None:
    """Ask the process at a hand-over socket to run it; None: it does not, or is silent.

    Args:
        answer_s: what there is for the answer. silence_s: after that who took it is given up.
    """
    frames = Frames(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), timeout_s=answer_s)
    try:
        frames.connect(Path(address_of_pool).with_name(_SOCKET))
        frames.send_text(encode(request))
        if frames.receive_flag():
            frames.timeout_s = silence_s
            return frames
    except (OSError, ValueError, ConnectionClosed):  # nobody there, or no path at all
        pass
    frames.hang_up()
    return None


def pass_on(batches: Iterator[pa.RecordBatch], frames: Frames) -> Iterator[pa.RecordBatch]:
    """A caller's part: its input to the callee, the callee's output to Spark.

    Raises:
        PeerLostError: the callee ended, or is frozen.
        StateBackendError: what the epoch raised there; the traceback is a note of it.
    """
    # A delegated epoch that computes holds this process's interpreter, which is taken here some ten
    # times for a batch: at 1 ms each that was 50 ms for an epoch's input.
    with frames, system.quick_turns(_TURN_S):
        try:
            with contextlib.suppress(ConnectionClosed):  # it may have failed, and says why below
                for batch in batches:
                    frames.send_batch(batch)
                frames.end()
            while (batch := frames.batch()) is not None:
                yield batch
                frames.send_flag(True)
        except ConnectionClosed as error:
            raise PeerLostError(
                "This task ran in another worker, which has the store open. That worker has "
                f"ended, or was silent for {frames.timeout_s} s ({error}).",
                todo="Spark tries the task again, without that worker. Find out why it ended, or "
                "froze.",
            ) from error
        except Failed as failed:
            raise failed.error() from None


def _accompany(run: Run, request: Request, frames: Frames) -> None:
    """A delegated epoch, from the caller's input to the caller's Spark."""
    try:
        with contextlib.closing(run(request, frames.batches())) as output:  # type: ignore[type-var]
            for batch in output:
                frames.send_batch(batch)
                frames.receive_flag()
        frames.end()
    except ConnectionClosed:
        raise
    except BaseException as error:  # whatever it is, it is the caller's attempt that fails
        frames.fail(error)


def _at_exit(pid: int) -> None:
    if pid == os.getpid() and DelegatedEpochs._instance is not None:
        DelegatedEpochs._instance[1].close()
