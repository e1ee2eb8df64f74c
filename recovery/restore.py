"""Carrying out a restore in a worker: from what is on this host to a store that stands at an epoch.

The coordinator decides (:mod:`recovery.plan`); what turns out to be damaged on the way is marked,
left out, and the coordinator is asked again: always for the same epoch, never for an older one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Final

from blake3 import blake3

from recovery.fetch import fetch_file, fetch_index
from recovery.local import Incarnation, LocalSubtask
from snapshot.base import decode_index
from snapshot.delta import DeltaRows
from snapshot.delta_stream import as_lists, iter_delta
from snapshot.messages import BeginReply, LocalCopy, RestoreReport, RestoreStep
from snapshot.record import slice_key
from snapshot.storage.base import ObjectStore
from statebackend.errors import (
    CorruptionError,
    FormatError,
    LocalCopyError,
    LocalDeltaError,
    ObjectNotFoundError,
    StateBackendError,
    StoreBusyError,
)
from statebackend.rocks.store import Marker, RocksSettings, RocksStore

__all__ = ["OpenSubtask", "Restorer", "Site"]

_ORPHANED: Final = "the process that kept the store open has ended"
_log = logging.getLogger("statebackend.recovery")
# A damaged store, then a damaged local delta on its successor, and two to spare.
_ATTEMPTS: Final = 4
_IN_MEMORY_BYTES: Final = 64 << 20

Ask = Callable[[LocalCopy], tuple[BeginReply, list[bytes]]]


@dataclass(frozen=True)
class Site:
    """Which subtask, and where it is being opened."""

    operator: str
    subtask: int
    host: str
    executor: str


@dataclass
class _Tally:
    """What a restore read, for its report."""

    local_bytes: int = 0
    durable_bytes: int = 0
    durable_reads: int = 0
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class OpenSubtask:
    """A store that stands at ``reply.durable_epoch``, leased; and how it got there.

    ``layers``: epochs after that, up to ``reply.base_epoch``, to be laid over it.
    """

    incarnation: Incarnation
    store: RocksStore
    reply: BeginReply
    layers: list[tuple[int, Iterator[DeltaRows]]]
    report: RestoreReport | None


class Restorer:
    """Leases a local store and brings it to the epoch that the coordinator names.

    Args:
        ask: sends ``begin`` with what is here; the reply, and the bytes of its record steps.
        store: the durable one.
        lease_timeout_s: how long a store that another process holds is waited for.
    """

    def __init__(
        self,
        local: LocalSubtask,
        site: Site,
        *,
        ask: Ask,
        store: ObjectStore,
        now_s: Callable[[], float],
        lease_timeout_s: float,
        settings: RocksSettings,
    ) -> None:
        self._local, self._site = local, site
        self._ask, self._store = ask, store
        self._now_s = now_s
        self._lease_timeout_s = lease_timeout_s
        self._settings = settings
        self._tally = _Tally()
        self._without_deltas = False  # one was damaged: after a power cut so are its neighbours
        self._bad_slices: set[str] = set()  # durable ones, see slice_key

    def open(self) -> OpenSubtask:
        """Do it.

        Raises:
            CorruptionError: a durable slice is damaged (and no local copy makes it unnecessary).
            LocalDirError: the local directory cannot be used.
            LocalCopyError: one local store after the other could not be used.
        """
        started_s = self._now_s()
        held, reason = self._local.acquire(self._lease_timeout_s)
        new = bool(reason)
        for _ in range(_ATTEMPTS):
            if reason:
                self._tally.reasons.append(reason)
            try:
                brought = self._bring(held, new=new)
            except _Unusable as unusable:
                held, reason = unusable.held, unusable.reason
                if unusable.replace:
                    with contextlib.suppress(LocalCopyError):  # it is on its way out
                        held.release()
                    held, new = self._local.create(), True
                continue
            held, reply = brought.held, brought.reply
            if held.opened_here:
                self._sweep(held)
            assert held.store is not None
            if held.orphaned and held.opened_here and not self._tally.reasons:
                self._tally.reasons.append(_ORPHANED)
            report = self._report(reply, self._now_s() - started_s)
            layers = [(step.epoch, rows) for step, rows in brought.layers]
            return OpenSubtask(held, held.store, reply, layers, report)
        held.release()
        raise LocalCopyError(
            f"Operator {self._site.operator!r}, subtask {self._site.subtask}: {_ATTEMPTS} local "
            f"copies in a row could not be used ({reason}).",
            todo="Check the disk behind local_dir.",
        )

    def _sweep(self, held: Incarnation) -> None:
        try:
            self._local.sweep(held)
        except (StateBackendError, OSError) as error:  # housekeeping: the next opening does it
            _log.warning("old local copies beside %s were left (%s)", held.path, error)

    def _bring(self, held: Incarnation, *, new: bool) -> _Brought:
        """One try; a new incarnation may have taken the place of ``held``."""
        try:
            if new:
                copy = LocalCopy(damaged=sorted(self._bad_slices))
            else:
                opening = held.store is None
                held.open_store(self._settings)
                copy = held.describe(self._bad_slices, deltas=not self._without_deltas)
                if opening and copy.epoch is not None:
                    held.drop_deltas(copy.epoch)  # what was on disk when it was opened
            reply, bodies = self._ask(copy)
            if reply.fresh and not new:
                # The old one was not what the log names; it is left as it is, and swept.
                self._tally.reasons.append(reply.reason)
                with contextlib.suppress(LocalCopyError):
                    held.release()
                held, new = self._local.create(), True
            pieces = iter(bodies)
            held.settle()
            store = self._apply(held, reply, pieces)
            layers = [(s, self._rows(held, s, pieces)) for s in reply.layers if s.size_bytes]
            if held.opened_here:
                store.compact_if_due()
        except StoreBusyError as error:
            raise _Unusable(held, error.what, replace=True) from error
        except LocalDeltaError as error:
            self._without_deltas = True
            raise _Unusable(held, error.what, replace=False) from error
        except _DamagedStep as damaged:
            # Left out when the coordinator is asked again; it knows whether there is another way.
            self._bad_slices.add(slice_key(damaged.step.kind, damaged.step.digest))
            # A new store may hold a part of this way: the other way starts from an empty one.
            raise _Unusable(held, damaged.error.what, replace=damaged.torn or new) from damaged
        except LocalCopyError as error:
            held.mark_bad(error.what)
            raise _Unusable(held, error.what, replace=True) from error
        except BaseException:
            held.release()
            raise
        return _Brought(held, reply, layers)

    def _apply(self, held: Incarnation, reply: BeginReply, bodies: Iterator[bytes]) -> RocksStore:
        steps = reply.steps
        if steps and steps[0].kind == "files":
            self._restore_files(held, steps[0], bodies)
            steps = steps[1:]
        store = held.open_store(self._settings)
        if reply.fresh and not reply.steps:
            # An empty store stands somewhere too: the next epoch's local delta goes on top of it.
            store.apply((), (), self._marker(reply, reply.durable_epoch, reply.durable_chain))
        for step in steps:
            marker = self._marker(reply, step.epoch, step.chain)
            recent = held.recent
            if not step.size_bytes:
                store.apply((), (), marker)
            elif step.source == "local" and recent and recent.digest == step.digest:
                store.apply(recent.keys, recent.values, marker)
            else:
                rows = self._rows(held, step, bodies)
                store.apply_batches(as_lists(rows), marker)
            held.unflushed_epochs += 1
        held.recent = None
        if reply.fresh:
            # Once, so that there is a marker on disk: until the next flush the local deltas go on
            # top of it, should this process be killed.
            store.flush()
            held.unflushed_epochs = 0
        return store

    def _restore_files(self, held: Incarnation, step: RestoreStep, bodies: Iterator[bytes]) -> None:
        """Fetch RocksDB's own files into an incarnation that has no store yet."""
        data = self._read(held, step, bodies)
        try:
            if blake3(data).hexdigest() != step.digest:
                raise CorruptionError(f"The file index of epoch {step.epoch} is not what is named.")
            index = decode_index(data, step.name)
            fetched_bytes = fetch_index(self._store, index, held.path / "db")
        except (FormatError, ObjectNotFoundError) as error:
            raise _DamagedStep(step, error, torn=True) from error
        self._tally.durable_bytes += fetched_bytes
        self._tally.durable_reads += len(index.files)
        marker = held.open_store(self._settings).marker()
        if marker is None or (marker.epoch, marker.chain) != (step.epoch, step.chain):
            other = CorruptionError(f"The base of epoch {step.epoch} holds another state.")
            raise _DamagedStep(step, other, torn=True)
        held.remember_uploaded(data)

    def _marker(self, reply: BeginReply, epoch: int, chain: str) -> Marker:
        return Marker(
            job_id=reply.job_id,
            operator=self._site.operator,
            key_group_start=reply.key_group_start,
            key_group_end=reply.key_group_end,
            epoch=epoch,
            chain=chain,
        )

    def _rows(
        self, held: Incarnation, step: RestoreStep, bodies: Iterator[bytes]
    ) -> Iterator[DeltaRows]:
        """A delta's rows, in pieces; its digest is checked before this returns."""
        digest = bytes.fromhex(step.digest)
        tries = 2 if step.source == "object" else 1  # a bit that flipped on its way
        while True:
            tries -= 1
            rows = iter_delta(self._source(held, step, bodies), digest=digest, name=step.name)
            try:
                first = next(rows, None)
                return iter(()) if first is None else chain((first,), rows)
            except CorruptionError as error:
                if step.source == "local":
                    self._forget(held, step)
                    raise LocalDeltaError(error.what, todo=error.todo) from error
                if not tries:
                    raise _DamagedStep(step, error) from error

    def _source(
        self, held: Incarnation, step: RestoreStep, bodies: Iterator[bytes]
    ) -> bytes | Path:
        """Where a delta's bytes are: in memory, or in a file if they are many."""
        if step.size_bytes <= _IN_MEMORY_BYTES:
            return self._read(held, step, bodies)
        if step.source == "local":
            self._tally.local_bytes += step.size_bytes
            return held.delta_path(step.epoch, step.digest)
        path = held.work_folder("fetch") / step.digest
        try:
            fetch_file(self._store, step.name, path, size_bytes=step.size_bytes, digest=step.digest)
        except (FormatError, ObjectNotFoundError) as error:
            raise _DamagedStep(step, error) from error
        self._tally.durable_bytes += step.size_bytes
        self._tally.durable_reads += 1
        return path

    def _read(self, held: Incarnation, step: RestoreStep, bodies: Iterator[bytes]) -> bytes:
        tally = self._tally
        if step.source == "local":
            try:
                data = held.read_delta(step.epoch, step.digest)
            except LocalDeltaError:
                self._forget(held, step)
                raise
            tally.local_bytes += len(data)
            return data
        if step.source == "record":
            data = next(bodies)
        else:
            try:
                data = self._store.get(step.name)
            except ObjectNotFoundError as error:
                raise _DamagedStep(step, error) from error
        tally.durable_bytes += len(data)
        tally.durable_reads += 1
        return data

    def _forget(self, held: Incarnation, step: RestoreStep) -> None:
        held.forget_delta(step.epoch, step.digest)

    def _report(self, reply: BeginReply, seconds: float) -> RestoreReport | None:
        """What to say of this opening; None for the ordinary one of a running subtask."""
        tally, site = self._tally, self._site
        moved = bool(tally.reasons) or tally.durable_reads > 0
        if not reply.restoring and not moved:
            return None
        if reply.fresh:
            source = "durable" if reply.steps else "empty"
        else:
            source = "mixed" if tally.durable_reads else "local"
        report = RestoreReport(
            operator=site.operator,
            subtask=site.subtask,
            epoch=reply.base_epoch,
            source=source,
            local_bytes=tally.local_bytes,
            durable_bytes=tally.durable_bytes,
            durable_reads=tally.durable_reads,
            seconds=seconds,
            host=site.host,
            executor=site.executor,
            reason="" if source == "empty" else "; ".join(dict.fromkeys(tally.reasons)),
        )
        _log.info("restored %s", report)
        return report


@dataclass(frozen=True)
class _Brought:
    """A store that was brought to the epoch, and what lies over it."""

    held: Incarnation
    reply: BeginReply
    layers: list[tuple[RestoreStep, Iterator[DeltaRows]]]


class _DamagedStep(Exception):
    """A durable slice is damaged or gone; ``torn``: the store that it went into is half made."""

    def __init__(self, step: RestoreStep, error: StateBackendError, *, torn: bool = False) -> None:
        super().__init__(error.what)
        self.step, self.error, self.torn = step, error, torn


class _Unusable(Exception):
    """A local copy failed; ``replace`` says whether a new incarnation is wanted."""

    def __init__(self, held: Incarnation, reason: str, *, replace: bool) -> None:
        super().__init__(reason)
        self.held, self.reason, self.replace = held, reason, replace
