"""Carrying out a restore in a worker: from what is on this host to a store that stands at an epoch.

The coordinator decides (:mod:`recovery.plan`); what turns out to be damaged on the way is marked,
left out, and the coordinator is asked again: always for the same epoch, never for an older one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from recovery.local import Incarnation, LocalSubtask
from snapshot.delta import decode_delta
from snapshot.messages import BeginReply, LocalCopy, RestoreReport, RestoreStep
from statebackend.errors import CorruptionError, LocalCopyError, LocalDeltaError, StoreBusyError
from statebackend.rocks.store import Marker, RocksSettings, RocksStore

__all__ = ["OpenSubtask", "Restorer", "Site"]

_log = logging.getLogger("statebackend.recovery")
# A damaged store, then a damaged local delta on its successor, and two to spare.
_ATTEMPTS: Final = 4

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
    """A store that stands at ``reply.base_epoch``, leased; and how it got there."""

    incarnation: Incarnation
    store: RocksStore
    reply: BeginReply
    report: RestoreReport | None


class Restorer:
    """Leases a local store and brings it to the epoch that the coordinator names.

    Args:
        ask: sends ``begin`` with what is here; the reply, and the bytes of its record steps.
        fetch: reads an object of the durable store, whole.
        lease_timeout_s: how long a store that another process holds is waited for.
    """

    def __init__(
        self,
        local: LocalSubtask,
        site: Site,
        *,
        ask: Ask,
        fetch: Callable[[str], bytes],
        now_s: Callable[[], float],
        lease_timeout_s: float,
        settings: RocksSettings,
    ) -> None:
        self._local, self._site = local, site
        self._ask, self._fetch = ask, fetch
        self._now_s = now_s
        self._lease_timeout_s = lease_timeout_s
        self._settings = settings
        self._tally = _Tally()
        self._damaged: set[tuple[int, str]] = set()

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
                held, reply = self._bring(held, new=new)
            except _Unusable as unusable:
                held, reason = unusable.held, unusable.reason
                if unusable.replace:
                    with contextlib.suppress(LocalCopyError):  # it is on its way out
                        held.release()
                    held, new = self._local.create(), True
                continue
            self._local.sweep(held)
            assert held.store is not None
            report = self._report(reply, self._now_s() - started_s)
            return OpenSubtask(held, held.store, reply, report)
        held.release()
        raise LocalCopyError(
            f"Operator {self._site.operator!r}, subtask {self._site.subtask}: {_ATTEMPTS} local "
            f"copies in a row could not be used ({reason}).",
            todo="Check the disk behind local_dir.",
        )

    def _bring(self, held: Incarnation, *, new: bool) -> tuple[Incarnation, BeginReply]:
        """One try; a new incarnation may have taken the place of ``held``."""
        try:
            store = held.open_store(self._settings)
            copy = LocalCopy() if new else held.describe(self._damaged)
            if copy.epoch is not None:
                held.drop_deltas(copy.epoch)
            reply, bodies = self._ask(copy)
            if reply.fresh and not new:
                # The old one was not what the log names; it is left as it is, and swept.
                self._tally.reasons.append(reply.reason)
                with contextlib.suppress(LocalCopyError):
                    held.release()
                held = self._local.create()
                store = held.open_store(self._settings)
            self._apply(held, store, reply, iter(bodies))
            store.compact_if_due()
        except StoreBusyError as error:
            raise _Unusable(held, error.what, replace=True) from error
        except LocalDeltaError as error:
            raise _Unusable(held, error.what, replace=False) from error
        except LocalCopyError as error:
            held.mark_bad(error.what)
            raise _Unusable(held, error.what, replace=True) from error
        except BaseException:
            held.release()
            raise
        return held, reply

    def _apply(
        self, held: Incarnation, store: RocksStore, reply: BeginReply, bodies: Iterator[bytes]
    ) -> None:
        if reply.fresh and not reply.steps:
            # An empty store stands somewhere too: the next epoch's local delta goes on top of it.
            store.apply((), (), self._marker(reply, reply.base_epoch, reply.chain))
        for step in reply.steps:
            marker = self._marker(reply, step.epoch, step.chain)
            if not step.size_bytes:
                store.apply((), (), marker)
                continue
            data = self._read(held, step, bodies)
            try:
                rows = decode_delta(data, digest=bytes.fromhex(step.digest), name=step.name)
            except CorruptionError as error:
                if step.source != "local":
                    raise
                self._forget(held, step)
                raise LocalDeltaError(error.what, todo=error.todo) from error
            store.apply(rows.keys.to_pylist(), rows.values.to_pylist(), marker)

    def _marker(self, reply: BeginReply, epoch: int, chain: str) -> Marker:
        return Marker(
            job_id=reply.job_id,
            operator=self._site.operator,
            key_group_start=reply.key_group_start,
            key_group_end=reply.key_group_end,
            epoch=epoch,
            chain=chain,
        )

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
        data = next(bodies) if step.source == "record" else self._fetch(step.name)
        tally.durable_bytes += len(data)
        tally.durable_reads += 1
        return data

    def _forget(self, held: Incarnation, step: RestoreStep) -> None:
        # Left out when the coordinator is asked again, whether or not the file goes.
        self._damaged.add((step.epoch, step.digest))
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


class _Unusable(Exception):
    """A local copy failed; ``replace`` says whether a new incarnation is wanted."""

    def __init__(self, held: Incarnation, reason: str, *, replace: bool) -> None:
        super().__init__(reason)
        self.held, self.reason, self.replace = held, reason, replace
