"""Carrying out a restore in a worker: from what is on this host to a store that stands at an epoch.

The coordinator decides (:mod:`recovery.plan`); what turns out to be damaged on the way is marked,
left out, and the coordinator is asked again: always for the same epoch, never for an older one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from recovery.local import Incarnation, LocalSubtask
from snapshot.delta import decode_delta
from snapshot.messages import BeginReply, LocalCopy, RestoreReport, RestoreStep
from statebackend.errors import CorruptionError, LocalCopyError, StoreBusyError
from statebackend.rocks.store import Marker, RocksSettings, RocksStore

__all__ = ["OpenSubtask", "open_subtask"]

_log = logging.getLogger("statebackend.recovery")
_ATTEMPTS: Final = 4

Ask = Callable[[LocalCopy], tuple[BeginReply, list[bytes]]]


class LocalDeltaError(LocalCopyError):
    """A local delta is damaged; the store beside it need not be."""

    code = "SB6004"


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


def open_subtask(
    local: LocalSubtask,
    *,
    ask: Ask,
    fetch: Callable[[str], bytes],
    job_id: str,
    operator: str,
    subtask: int,
    host: str,
    executor: str,
    now_s: Callable[[], float],
    lease_timeout_s: float,
    settings: RocksSettings,
) -> OpenSubtask:
    """Lease a local store and bring it to the epoch that the coordinator names.

    Args:
        ask: sends ``begin`` with what is here; the reply, and the bytes of its record steps.
        fetch: reads an object of the durable store, whole.

    Raises:
        CorruptionError: a durable slice is damaged (and no local copy makes it unnecessary).
        LocalDirError: the local directory cannot be used.
    """
    started_s = now_s()
    tally = _Tally()
    held, reason = local.acquire(lease_timeout_s)
    new = bool(reason)
    # "No copy yet" is what every first start says; anything else is worth telling.
    for attempt in range(_ATTEMPTS):
        try:
            if reason:
                tally.reasons.append(reason)
            store = held.open_store(settings)
            copy = LocalCopy() if new else held.describe()
            if copy.epoch is not None:
                held.drop_deltas(copy.epoch)
            reply, bodies = ask(copy)
            if reply.fresh and not new:
                tally.reasons.append(reply.reason)
                held.release()
                held, new, reason = local.create(), True, ""
                store = held.open_store(settings)
            _apply(held, store, reply, bodies, fetch, tally, job_id, operator)
            store.compact_if_due()
            break
        except StoreBusyError as error:
            reason = error.what
        except LocalDeltaError as error:
            tally.reasons.append(error.what)  # the file is gone: ask again with what is left
            continue
        except LocalCopyError as error:
            reason = error.what
            held.mark_bad(error.what)
        except BaseException:
            held.release()
            raise
        held.release()
        if attempt == _ATTEMPTS - 1:
            raise LocalCopyError(
                f"Operator {operator!r}, subtask {subtask}: {_ATTEMPTS} local stores in a row "
                f"could not be used ({reason}).",
                todo="Check the disk behind local_dir.",
            )
        held, new = local.create(), True
    local.sweep(held)
    report = None
    if reply.restoring or tally.reasons:
        report = _report(reply, tally, operator, subtask, host, executor, now_s() - started_s)
        _log.info("restored %s", report)
    return OpenSubtask(held, store, reply, report)


def _apply(
    held: Incarnation,
    store: RocksStore,
    reply: BeginReply,
    bodies: Sequence[bytes],
    fetch: Callable[[str], bytes],
    tally: _Tally,
    job_id: str,
    operator: str,
) -> None:
    inline = iter(bodies)

    def marker(epoch: int, chain: str) -> Marker:
        return Marker(
            job_id=job_id,
            operator=operator,
            key_group_start=reply.key_group_start,
            key_group_end=reply.key_group_end,
            epoch=epoch,
            chain=chain,
        )

    if reply.fresh and not reply.steps:
        # An empty store stands somewhere too: the next epoch's local delta goes on top of it.
        store.apply((), (), marker(reply.base_epoch, reply.chain))
    for step in reply.steps:
        data = _read(held, step, inline, fetch, tally)
        if not data:
            store.apply((), (), marker(step.epoch, step.chain))
            continue
        try:
            rows = decode_delta(data, digest=bytes.fromhex(step.digest), name=step.name)
        except CorruptionError as error:
            if step.source != "local":
                raise
            held.forget_delta(step.epoch, step.digest)
            raise LocalDeltaError(error.what, todo=error.todo) from error
        at = marker(step.epoch, step.chain)
        store.apply(rows.keys.to_pylist(), rows.values.to_pylist(), at)


def _read(
    held: Incarnation,
    step: RestoreStep,
    inline: object,
    fetch: Callable[[str], bytes],
    tally: _Tally,
) -> bytes:
    if step.rows == 0 and step.size_bytes == 0:
        return b""
    if step.source == "local":
        data = held.read_delta(step.epoch, step.digest)
        tally.local_bytes += len(data)
        return data
    data = next(inline) if step.source == "record" else fetch(step.name)  # type: ignore[call-overload]
    tally.durable_bytes += len(data)
    tally.durable_reads += 1
    return data


def _report(
    reply: BeginReply,
    tally: _Tally,
    operator: str,
    subtask: int,
    host: str,
    executor: str,
    seconds: float,
) -> RestoreReport:
    if reply.base_epoch < 0 or (reply.fresh and not reply.steps):
        source = "empty"
    elif reply.fresh:
        source = "durable"
    else:
        source = "mixed" if tally.durable_reads else "local"
    reasons = [r for r in tally.reasons if r]
    return RestoreReport(
        operator=operator,
        subtask=subtask,
        epoch=reply.base_epoch,
        source=source,
        local_bytes=tally.local_bytes,
        durable_bytes=tally.durable_bytes,
        durable_reads=tally.durable_reads,
        seconds=seconds,
        host=host,
        executor=executor,
        reason="" if source in ("empty", "local") else "; ".join(dict.fromkeys(reasons)),
    )
