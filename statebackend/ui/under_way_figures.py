"""A checkpoint that is under way, as figures: who has begun, who has acked, who has not. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from recovery.inspect.history import OperatorFigures, RestoreSummary, SubtaskFigures
from recovery.inspect.history_figures import restore_summary
from snapshot.log.figures_book import EpochSeen, restore_totals
from snapshot.log.progress_events import SubtaskProgress
from snapshot.protocol.messages import RestoreReport
from statebackend.runtime.driver.job_status import UnderWay
from statebackend.ui.job_figures import Waiting
from statebackend.ui.page_charts import quantile

__all__ = ["moved_at_s", "operator_now", "restores_now", "waiting_of"]


def waiting_of(under_way: UnderWay | None, seen: Mapping[str, EpochSeen] | None) -> list[Waiting]:
    """Whom it waits for; nobody, where none is under way.

    Args:
        seen: by operator, who has begun; None: that is not known.
    """
    if under_way is None:
        return []
    return [
        Waiting(
            operator=uid,
            subtasks=list(missing),
            parallelism=under_way.parallelism[uid],
            not_begun=[] if seen is None else _not_begun(missing, seen.get(uid)),
        )
        for uid, missing in under_way.missing.items()
    ]


def _not_begun(missing: Iterable[int], seen: EpochSeen | None) -> list[int]:
    return [one for one in missing if seen is None or one not in seen.begins]


def moved_at_s(seen: Mapping[str, EpochSeen]) -> float | None:
    """When a subtask began or acked last."""
    begun = (began.at_s for one in seen.values() for began in one.begins.values())
    acked = (at_s for one in seen.values() for at_s in one.acked_s.values())
    return max((*begun, *acked), default=None)


def operator_now(
    uid: str,
    parallelism: int,
    missing: Sequence[int],
    acked: Iterable[SubtaskProgress],
    seen: EpochSeen | None,
) -> OperatorFigures:
    """One operator of a checkpoint under way: who has acked, and where the others run."""
    waits, by_number = set(missing), {one.subtask: one for one in acked}
    parts = [
        _subtask_now(number, by_number.get(number), seen, waits=number in waits)
        for number in range(parallelism)
    ]
    ends = sorted(one.end_to_end_ms for one in parts if one.end_to_end_ms is not None)
    return OperatorFigures(
        uid=uid,
        sequence=-1,
        subtasks=parallelism,
        delta_bytes=sum(one.delta_bytes for one in parts),
        delta_rows=sum(one.delta_rows for one in parts),
        ack_median_ms=quantile(ends, 0.5) if ends else None,
        by_subtask=parts,
    )


def _subtask_now(
    number: int, acked: SubtaskProgress | None, seen: EpochSeen | None, *, waits: bool
) -> SubtaskFigures:
    began = seen.begins.get(number) if seen is not None else None
    delay = 1000 * (began.at_s - seen.began_s) if seen is not None and began is not None else None
    if acked is None:
        return SubtaskFigures(
            subtask=number,
            executor=began.executor if began is not None else "",
            host=began.host if began is not None else "",
            start_delay_ms=delay,
            end_to_end_ms=None if waits else 0.0,
        )
    return SubtaskFigures(
        subtask=number,
        executor=began.executor if began is not None else "",
        host=began.host if began is not None else "",
        attempt=acked.attempt,
        start_delay_ms=delay,
        end_to_end_ms=None if waits else acked.since_begin_ms,
        timings_ms=acked.timings_ms,
        rows=acked.figures.get("rows"),
        delta_bytes=acked.delta_bytes,
        delta_rows=acked.delta_rows,
        base_bytes=acked.base_bytes,
    )


def restores_now(
    acked: Iterable[SubtaskProgress], generation: int, at_ms: int | None
) -> list[RestoreSummary]:
    """How subtasks that have acked got their state back: no record says it yet."""
    reports: dict[str, list[RestoreReport]] = {}
    for one in acked:
        if one.restore is not None:
            reports.setdefault(one.operator, []).append(one.restore)
    return [
        restore_summary(uid, own[0].epoch, generation, at_ms, totals)
        for uid, own in reports.items()
        if (totals := restore_totals(own)) is not None
    ]
