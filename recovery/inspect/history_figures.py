"""From what records and the history say of an epoch to the figures that are asked for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias, TypeVar

import msgspec

from recovery.inspect.history import (
    CheckpointFigures,
    CheckpointStatus,
    JobMode,
    OperatorFigures,
    RestoreFigures,
    RestoreSummary,
    SubtaskFigures,
)
from recovery.savepoints.between_modes import CONTINUOUS
from snapshot.formats.epoch_figures import (
    EarlierRecord,
    RestoreTotals,
    SubtaskColumns,
    decode_figures,
)
from snapshot.formats.history_object import RecordSummary
from snapshot.formats.record import Manifest, SliceEntry

__all__ = [
    "Late",
    "checkpoint_of",
    "failed_of",
    "restore_summary",
    "restores_of",
    "subtasks_of",
]

Number = TypeVar("Number", int, float)
Late: TypeAlias = dict[int, EarlierRecord]
"""By sequence: what a later record says of that one."""


def checkpoint_of(
    records: Mapping[str, RecordSummary],
    *,
    late: Late,
    listed: Mapping[int, int | None],
    discarded: bool,
    followed: bool,
    repeated: int,
) -> CheckpointFigures:
    """One epoch, from its newest record of each operator.

    Args:
        late: what later records say. listed: the records that are there, and when written.
        discarded: the job went back to an epoch before it.
        followed: a later epoch is complete, so this one was.
        repeated: how many older records of it there are.
    """
    newest = max(records.values(), key=lambda one: one.sequence)
    operators = [_operator(one, late, listed) for _, one in sorted(records.items())]
    complete = followed or len(records) >= newest.operators
    status: CheckpointStatus = "complete" if complete else "running"
    started = [one.started_ms for one in operators if one.started_ms is not None]
    ended = [one.durable_ms for one in operators if one.durable_ms is not None]
    started_ms, durable_ms = min(started, default=None), max(ended, default=None)
    return CheckpointFigures(
        epoch=newest.epoch,
        status="discarded" if discarded else status,
        mode=_mode(newest),
        generation=newest.generation,
        sequence=newest.sequence,
        attempt=newest.figures.checkpoint if newest.figures.checkpoint >= 0 else None,
        stamp_ms=newest.stamp_ms,
        started_ms=started_ms,
        durable_ms=durable_ms if complete else None,
        total_ms=_total_ms(operators, started_ms),
        phases_ms=_phases(operators),
        record_bytes=sum(one.record_bytes for one in operators),
        delta_bytes=sum(one.delta_bytes for one in operators),
        delta_rows=sum(one.delta_rows for one in operators),
        bases=sum(one.bases for one in operators),
        rows=_sum(one.rows for one in operators),
        late_rows=_sum(one.late_rows for one in operators),
        timers_fired=_sum(one.timers_fired for one in operators),
        watermark_ms=newest.watermark_ms,
        state_bytes=_sum(one.state_bytes for one in operators),
        requests=_requests(operators),
        repeated=repeated,
        restores=sum(
            sum(one.figures.restores.by_source.values())
            for one in records.values()
            if one.figures.restores
        ),
        has_detail=all(one.sequence in listed for one in operators),
        operators=operators,
    )


def _mode(one: RecordSummary) -> JobMode:
    return "continuous" if one.query_id == CONTINUOUS else "micro-batch"


def _operator(one: RecordSummary, late: Late, listed: Mapping[int, int | None]) -> OperatorFigures:
    figures, after = one.figures, late.get(one.sequence)
    counts = figures.counts
    return OperatorFigures(
        uid=one.operator,
        sequence=one.sequence,
        subtasks=one.parallelism,
        record_bytes=figures.record_bytes,
        delta_bytes=figures.delta_bytes,
        delta_rows=figures.delta_rows,
        bases=figures.bases,
        base_bytes=figures.base_bytes,
        uploaded_bytes=figures.uploaded_bytes,
        phases_ms=figures.phases_ms,
        started_ms=_known(figures.started_ms),
        durable_ms=after.durable_ms if after else listed.get(one.sequence),
        acks_ms=_known(figures.acks_ms),
        commit_ms=after.commit_ms if after else None,
        ack_median_ms=_known(figures.median_ms),
        ack_p95_ms=_known(figures.p95_ms),
        slowest=_known(figures.slowest),
        slowest_on=figures.slowest_on,
        rows=counts.get("rows"),
        late_rows=counts.get("late_rows"),
        timers_fired=counts.get("timers_fired"),
        next_timer_ms=one.next_timer_ms,
        state_bytes=counts.get("stored_bytes"),
        requests=figures.requests,
    )


def _known(value: Number) -> Number | None:
    """None for what was not known when it was written."""
    return value if value >= 0 else None


def _total_ms(operators: Iterable[OperatorFigures], started_ms: int | None) -> float | None:
    """To the last record's end; as far as is known, where nothing later says when that was."""
    ends = [
        one.started_ms - started_ms + one.acks_ms + (one.commit_ms or 0.0)
        for one in operators
        if started_ms is not None and one.started_ms is not None and one.acks_ms is not None
    ]
    return max(ends, default=None)


def _phases(operators: Iterable[OperatorFigures]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in operators:
        for name, ms in {**one.phases_ms, "acks": one.acks_ms, "commit": one.commit_ms}.items():
            if ms is not None:
                found[name] = max(ms, found.get(name, 0.0))
    return found


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _requests(operators: Iterable[OperatorFigures]) -> dict[str, tuple[int, int]]:
    total: dict[str, tuple[int, int]] = {}
    for one in operators:
        for verb, (requests, size_bytes) in one.requests.items():
            before = total.get(verb, (0, 0))
            total[verb] = before[0] + requests, before[1] + size_bytes
    return total


def failed_of(one: RecordSummary) -> list[CheckpointFigures]:
    """The checkpoints that a record says have failed."""
    return [
        CheckpointFigures(
            epoch=failed.epoch,
            status="failed",
            mode=_mode(one),
            generation=one.generation,
            attempt=failed.checkpoint if failed.checkpoint >= 0 else None,
            reason=f"{failed.reason}; it waited for {', '.join(failed.waited_for)}"
            if failed.waited_for
            else failed.reason,
            started_ms=failed.started_ms,
            total_ms=_known(failed.took_ms),
        )
        for failed in one.figures.failed
    ]


def restores_of(records: Iterable[RecordSummary]) -> list[RestoreSummary]:
    """How the operators got their state back in an epoch, where they had to."""
    return [
        restore_summary(
            one.operator, one.epoch, one.generation, _known(one.figures.started_ms), totals
        )
        for one in records
        if (totals := one.figures.restores) is not None
    ]


def restore_summary(
    operator: str, epoch: int, generation: int, at_ms: int | None, totals: RestoreTotals
) -> RestoreSummary:
    """All restores of an operator in an epoch. ``at_ms``: when it began; None: not known."""
    slowest = [
        RestoreFigures(
            operator=operator,
            epoch=epoch,
            generation=generation,
            at_ms=at_ms,
            **{name: getattr(each, name) for name in each.__struct_fields__},
        )
        for each in totals.slowest
    ]
    return RestoreSummary(
        operator=operator,
        epoch=epoch,
        generation=generation,
        at_ms=at_ms,
        subtasks=sum(totals.by_source.values()),
        by_source=totals.by_source,
        local_bytes=totals.local_bytes,
        durable_bytes=totals.durable_bytes,
        max_seconds=totals.max_seconds,
        slowest=slowest,
    )


# --- subtasks ------------------------------------------------------------------------------------


def subtasks_of(one: CheckpointFigures, read: Callable[[int], Manifest]) -> CheckpointFigures:
    """With what its records say of each subtask.

    Args:
        read: the manifest of a sequence. What it raises is raised.
    """
    operators = [
        msgspec.structs.replace(operator, by_subtask=_by_subtask(read(operator.sequence), one.mode))
        for operator in one.operators
    ]
    return msgspec.structs.replace(one, operators=operators)


def _by_subtask(manifest: Manifest, mode: JobMode) -> list[SubtaskFigures]:
    figures = decode_figures(manifest.figures)
    columns = (figures.by_subtask() if figures is not None else None) or SubtaskColumns()
    deltas = {e.subtask: e for e in manifest.slices if e.kind == "delta"}
    bases = {e.subtask: e for e in manifest.slices if e.kind in ("base", "files")}
    # A source's record is the driver's, and has one slice, whatever its parallelism.
    of_driver = len(columns.acked_ms) not in (0, len(deltas))
    count = len(columns.acked_ms) if of_driver else len(deltas)
    return [
        _subtask(
            number,
            columns,
            mode,
            None if of_driver else deltas.get(number),
            None if of_driver else bases.get(number),
        )
        for number in range(count)
    ]


def _subtask(
    number: int,
    columns: SubtaskColumns,
    mode: JobMode,
    delta: SliceEntry | None,
    base: SliceEntry | None,
) -> SubtaskFigures:
    timings = dict(delta.timings_ms) if delta is not None else {}
    for name, values in columns.timings_ms.items():
        if (measured := _at(values, number)) is not None:
            timings[name] = float(measured)
    place = _at(columns.ran_on, number)
    executor, host = ("", "") if place is None else columns.executors[place]
    continuous = mode == "continuous"
    written = [ms for name in ("snapshot", "base") if (ms := timings.get(name)) is not None]
    return SubtaskFigures(
        subtask=number,
        executor=executor,
        host=host,
        attempt=delta.attempt if delta is not None else 0,
        start_delay_ms=timings.get("start_delay") if continuous else _at(columns.begun_ms, number),
        alignment_ms=timings.get("alignment"),
        freeze_ms=timings.get("sync"),
        persist_ms=timings.get("async") if continuous else (sum(written) if written else None),
        end_to_end_ms=_at(columns.acked_ms, number),
        timings_ms=timings,
        rows=_at(columns.rows, number),
        delta_bytes=delta.size_bytes if delta is not None else 0,
        delta_rows=delta.rows if delta is not None else 0,
        base_bytes=max(base.size_bytes, base.state_bytes) if base is not None else 0,
    )


def _at(values: list[int], number: int) -> int | None:
    """None for what was not known."""
    return values[number] if number < len(values) and values[number] >= 0 else None
