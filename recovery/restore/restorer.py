"""Carrying out a restore in a worker: from what is on this host to a store that stands at an epoch.

The coordinator decides (:mod:`recovery.decide.restore_plan`); what turns out to be damaged on the
way is marked, left out, and the coordinator is asked again: always for the same epoch, never for an
older one.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from recovery.local.ancestor_copies import Ancestors
from recovery.local.local_copies import LocalSubtask
from recovery.local.store_directory import StoreDirectory
from recovery.restore.rescaled_store import Piece, PieceError, assemble, clip_pieces
from recovery.restore.step_reader import DamagedStep, StepReader
from snapshot.formats.delta import DeltaRows
from snapshot.formats.delta_in_pieces import as_lists
from snapshot.formats.record import slice_key
from snapshot.protocol.messages import (
    AncestorCopy,
    BeginReply,
    LocalCopy,
    RestoreReport,
    RestoreStep,
)
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import (
    CorruptionError,
    LocalCopyError,
    LocalDeltaError,
    StateBackendError,
    StoreBusyError,
)
from statebackend.rocks.parted import Store, open_store
from statebackend.rocks.store import Marker, RocksSettings
from statebackend.threads import THREADS, Threads

__all__ = ["OpenSubtask", "Restorer", "Site"]

_ORPHANED: Final = "the process that kept the store open has ended"
_log = logging.getLogger("statebackend.recovery")
# A damaged store, then a damaged local delta on its successor, and two to spare.
_ATTEMPTS: Final = 4
_PARTS: Final = "parts"
_TAKES: Final = 3

Ask = Callable[[LocalCopy, list[AncestorCopy] | None], tuple[BeginReply, list[bytes]]]


@dataclass(frozen=True)
class Site:
    """Which subtask, and where it is being opened."""

    operator: str
    subtask: int
    host: str
    executor: str


@dataclass(frozen=True)
class OpenSubtask:
    """A store that stands at ``reply.durable_epoch``, leased; and how it got there.

    ``layers``: epochs after that, up to ``reply.base_epoch``, to be laid over it.
    """

    directory: StoreDirectory
    store: Store
    reply: BeginReply
    layers: list[tuple[int, Iterator[DeltaRows]]]
    report: RestoreReport | None


class Restorer:
    """Leases a local store and brings it to the epoch that the coordinator names.

    Args:
        ask: sends ``begin`` with what is here (and, once it was told to look, of subtasks of
            another parallelism); the reply, and the bytes of its record steps.
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
        threads: Threads = THREADS,
    ) -> None:
        self._local, self._site = local, site
        self._ask, self._store = ask, store
        self._now_s = now_s
        self._lease_timeout_s = lease_timeout_s
        self._settings = settings
        self._without_deltas = False  # one was damaged: after a power cut so are its neighbours
        self._bad_slices: set[str] = set()  # durable ones, see slice_key
        self._ancestors_trusted = True
        self._ancestors = Ancestors(local, settings, lease_timeout_s=lease_timeout_s)
        self._reader = StepReader(store, self._ancestors, threads)
        self._tally = self._reader.tally

    def open(self) -> OpenSubtask:
        """Do it.

        Raises:
            CorruptionError: a durable slice is damaged (and no local copy makes it unnecessary).
            LocalDirError: the local directory cannot be used.
            LocalCopyError: one local store after the other could not be used.
        """
        started_s = self._now_s()
        self._held, reason = self._local.acquire(self._lease_timeout_s)
        self._is_new = bool(reason)
        # What it was made from may have the same damage.
        self._ancestors_trusted = not self._local.gone_bad
        for attempt in range(_ATTEMPTS):
            if reason:
                self._tally.reasons.append(reason)
            if attempt == _ATTEMPTS - 1:
                self._ancestors_trusted = False  # found each time, and gone when it was wanted
            try:
                reply, layers = self._bring()
            except _Unusable as unusable:
                reason = unusable.reason
                if unusable.replace:
                    self._replace()
                continue
            held = self._held
            if held.opened_here:
                self._sweep(held)
            assert held.store is not None
            if held.orphaned and held.opened_here and not self._tally.reasons:
                self._tally.reasons.append(_ORPHANED)
            report = self._report(reply, self._now_s() - started_s)
            return OpenSubtask(held, held.store, reply, layers, report)
        self._held.release()
        raise LocalCopyError(
            f"Operator {self._site.operator!r}, subtask {self._site.subtask}: {_ATTEMPTS} local "
            f"copies in a row could not be used ({reason}).",
            todo="Check the disk behind local_dir.",
        )

    def _sweep(self, held: StoreDirectory) -> None:
        try:
            self._local.sweep(held)
        except (StateBackendError, OSError) as error:  # housekeeping: the next opening does it
            _log.warning("old local copies beside %s were left (%s)", held.path, error)

    def _replace(self) -> None:
        """Hold a new store, in the place of the one that is held: that is left as it is."""
        with contextlib.suppress(LocalCopyError):  # it is on its way out
            self._held.release()
        self._held, self._is_new = self._local.create(), True

    def _bring(self) -> tuple[BeginReply, list[tuple[int, Iterator[DeltaRows]]]]:
        """One try to bring a store to where the coordinator says; and what lies over it.

        Raises:
            _Unusable: another try may do better.
        """
        try:
            reply, bodies = self._begin()
            if reply.fresh and not self._is_new:  # the old one is not what the log names
                self._tally.reasons.append(reply.reason)
                self._replace()
            held, pieces = self._held, iter(bodies)
            held.settle()
            store = self._apply(held, reply, pieces)
            layers = [
                (step.epoch, self._reader.rows(held, step, pieces))
                for step in reply.layers
                if step.size_bytes
            ]
            if held.opened_here:
                store.compact_clipped()
        except (LocalCopyError, DamagedStep) as error:
            raise self._unusable(error) from error
        except BaseException:
            self._held.release()
            raise
        finally:
            self._ancestors.release()
        return reply, layers

    def _begin(self) -> tuple[BeginReply, list[bytes]]:
        """Tell the coordinator what is here; of other subtasks too, if it asks for them."""
        copy = self._copy()
        reply, bodies = self._ask(copy, None)
        if reply.look_for:
            wanted = reply.look_for if self._ancestors_trusted else ()
            found = self._ancestors.look(wanted, deltas=not self._without_deltas)
            reply, bodies = self._ask(copy, found)
            if self._is_new:  # that there is no copy here goes without saying
                self._tally.reasons[:] = [reply.reason]
            self._tally.reasons += self._ancestors.refused
        return reply, bodies

    def _copy(self) -> LocalCopy:
        """The store that is held, opened, as the coordinator is told of it."""
        held = self._held
        if self._is_new:
            return LocalCopy(damaged=sorted(self._bad_slices))
        opening = held.store is None
        held.open_store(self._settings)
        copy = held.describe(self._bad_slices, deltas=not self._without_deltas)
        if opening and copy.epoch is not None:
            held.drop_deltas(copy.epoch)  # what was on disk when it was opened
        return copy

    def _unusable(self, error: LocalCopyError | DamagedStep) -> _Unusable:
        """Leave out what has failed; whether the store must be replaced for the next try."""
        # A new store may hold a part of this way: another way starts from an empty one.
        replace = self._is_new
        if isinstance(error, DamagedStep):
            # The coordinator knows whether there is another way.
            self._bad_slices.add(slice_key(error.step.kind, error.step.digest))
            return _Unusable(error.error.what, replace=replace or error.torn)
        if isinstance(error, LocalDeltaError):
            self._without_deltas = True
            return _Unusable(error.what, replace=replace)
        if not isinstance(error, StoreBusyError):
            self._held.mark_bad(error.what)
        return _Unusable(error.what, replace=True)

    def _apply(self, held: StoreDirectory, reply: BeginReply, bodies: Iterator[bytes]) -> Store:
        inherited = [step for step in reply.steps if step.keep is not None]
        steps = reply.steps[len(inherited) :]
        if inherited:
            self._inherit(held, reply, inherited, bodies)
        elif steps and steps[0].kind == "files":
            self._restore_files(held, steps[0], bodies)
            steps = steps[1:]
        store = held.open_store(self._settings)
        if reply.fresh and len(inherited) == len(reply.steps):
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
                rows = self._reader.rows(held, step, bodies)
                store.apply_batches(as_lists(rows), marker)
            held.unflushed_epochs += 1
        held.recent = None
        if reply.fresh:
            # Once, so that there is a marker on disk: until the next flush the local deltas go on
            # top of it, should this process be killed.
            store.flush()
            held.unflushed_epochs = 0
        return store

    def _inherit(
        self,
        held: StoreDirectory,
        reply: BeginReply,
        steps: list[RestoreStep],
        bodies: Iterator[bytes],
    ) -> None:
        """Make a store of parts of others' states, in a store directory that has none yet.

        Until the marker of the subtask's own lineage is set, it is good for nothing.
        """
        own = {
            number: next(bodies)
            for number, step in enumerate(steps)
            if step.source == "record" and step.size_bytes
        }

        def body(number: int) -> Iterator[bytes]:
            return iter((own.get(number, b""),))

        fetched: dict[int, Store] = {}
        try:
            for number, step in enumerate(steps):
                if step.kind == "files":
                    fetched[number] = self._fetched_store(held, step, body(number))
            store = self._assembled(held, steps, fetched)
        finally:
            for one in fetched.values():
                one.close()
            shutil.rmtree(held.path / "work" / _PARTS, ignore_errors=True)
        for number, step in enumerate(steps):
            if step.kind in ("delta", "base") and step.size_bytes:
                assert step.keep is not None
                rows = clip_pieces(self._reader.rows(held, step, body(number)), *step.keep)
                store.apply_batches(as_lists(rows), None)

    def _assembled(
        self, held: StoreDirectory, steps: list[RestoreStep], fetched: dict[int, Store]
    ) -> Store:
        """The parents' stores, as one; each of them is free for others again."""
        here = {step.found_at for step in steps if step.kind == "store"}
        wanted = [at for at in here if at is not None]
        for left in reversed(range(_TAKES if fetched else 1)):  # what was fetched cost more
            try:
                self._ancestors.take(wanted)
            except LocalCopyError:
                self._ancestors.release()
                if not left:
                    raise
            else:
                break
        pieces = []
        for number, step in enumerate(steps):
            if step.kind not in ("store", "files"):
                continue
            assert step.keep is not None
            source = fetched.get(number)
            if source is None:
                assert step.found_at is not None
                source = self._ancestors.store(step.found_at)
                self._tally.local_parts += 1
            pieces.append(Piece(source, *step.keep))
        try:
            return held.adopt_store(assemble(held.path / "db", pieces, self._settings, held.opener))
        except PieceError as damaged:
            for number, store in fetched.items():
                if damaged.piece.source is store:
                    raise DamagedStep(steps[number], damaged.error, torn=True) from damaged
            self._ancestors.mark_bad(damaged.piece.source, damaged.error.what)
            raise _Unusable(damaged.error.what, replace=True) from damaged
        finally:
            self._ancestors.release()

    def _fetched_store(
        self, held: StoreDirectory, step: RestoreStep, bodies: Iterator[bytes]
    ) -> Store:
        assert step.keep is not None
        folder = held.work_folder(_PARTS) / f"{step.keep[0]}-{step.epoch}"
        self._reader.fetch_files(held, step, bodies, folder)
        store = open_store(str(folder), self._settings, opener=held.opener)
        _check_marker(store, step)
        return store

    def _restore_files(
        self, held: StoreDirectory, step: RestoreStep, bodies: Iterator[bytes]
    ) -> None:
        """Fetch RocksDB's own files into a store directory that has no store yet."""
        data = self._reader.fetch_files(held, step, bodies, held.path / "db")
        _check_marker(held.open_store(self._settings), step)
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

    def _report(self, reply: BeginReply, seconds: float) -> RestoreReport | None:
        """What to say of this opening; None for the ordinary one of a running subtask."""
        tally, site = self._tally, self._site
        moved = bool(tally.reasons) or tally.durable_reads > 0
        if not reply.restoring and not moved:
            return None
        if reply.fresh and not tally.local_parts:
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


def _check_marker(store: Store, step: RestoreStep) -> None:
    """Refuse a base of files that holds another state than its index was named for."""
    marker = store.marker()
    if marker is None or (marker.epoch, marker.chain) != (step.epoch, step.chain):
        store.close()
        other = CorruptionError(f"The base of epoch {step.epoch} holds another state.")
        raise DamagedStep(step, other, torn=True)


class _Unusable(Exception):
    """A local copy failed; ``replace`` says whether a new one is wanted."""

    def __init__(self, reason: str, *, replace: bool) -> None:
        super().__init__(reason)
        self.reason, self.replace = reason, replace
