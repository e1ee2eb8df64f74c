"""A span for each epoch of an operator, and for each checkpoint, with its phases as children."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from snapshot.log.progress_events import (
    ContinuousCheckpoint,
    EpochProgress,
    ProgressEvent,
    SubtaskProgress,
)
from statebackend.monitoring.metric_table import JOB_LABEL

__all__ = ["EpochSpans"]

_NS_PER_MS: Final = 1_000_000
_PHASES: Final = ("start_delay", "alignment", "sync", "async")


class EpochSpans:
    """Makes the spans of one job once an epoch is over: only then are its times known.

    Args:
        tracer: OpenTelemetry's. wall_ms: the driver's clock.
    """

    def __init__(self, tracer: Any, wall_ms: Callable[[], int]) -> None:
        self._tracer, self._wall_ms = tracer, wall_ms
        self._slowest: dict[tuple[str, int], SubtaskProgress] = {}

    def heard(self, event: ProgressEvent) -> None:
        """Take in an event."""
        match event:
            case SubtaskProgress():
                key = event.operator, event.epoch
                known = self._slowest.get(key)
                if known is None or _took_ms(event) > _took_ms(known):
                    self._slowest[key] = event
            case EpochProgress():
                self._epoch(event)
            case ContinuousCheckpoint():
                self._checkpoint(event)

    def _epoch(self, event: EpochProgress) -> None:
        key = event.operator, event.epoch
        slowest = self._slowest.pop(key, None)
        for old in [one for one in self._slowest if one[0] == key[0] and one[1] < key[1]]:
            del self._slowest[old]
        end_ms = float(self._wall_ms())
        begin_ms = end_ms - event.acks_ms - event.commit_ms
        attributes = {
            JOB_LABEL: event.job,
            "operator": event.operator,
            "epoch": event.epoch,
            "subtasks": event.subtasks,
            "changed_rows": event.delta_rows,
            "changed_bytes": event.delta_bytes,
        }
        phases: list[tuple[str, float, float]] = []
        if slowest is not None:
            at_ms = begin_ms + slowest.since_begin_ms - _took_ms(slowest)
            attributes["slowest_subtask"] = slowest.subtask
            phases = _laid_out(slowest.timings_ms, at_ms)
        phases.append(("commit", end_ms - event.commit_ms, end_ms))
        # Reading begins before the driver hears of the epoch.
        begin_ms = min(begin_ms, *(start_ms for _, start_ms, _ in phases))
        self._record("statebackend.epoch", begin_ms, end_ms, attributes, phases)

    def _checkpoint(self, event: ContinuousCheckpoint) -> None:
        end_ms = float(self._wall_ms())
        begin_ms = end_ms - event.took_ms
        attributes = {JOB_LABEL: event.job, "checkpoint": event.checkpoint, "epoch": event.epoch}
        attributes["outcome"] = event.aborted or "complete"
        phases: list[tuple[str, float, float]] = []
        if event.subtasks:
            name, figures = max(event.subtasks.items(), key=lambda one: sum(_phases_ms(one[1])))
            attributes["slowest_subtask"] = name
            phases = _laid_out(dict(zip(_PHASES, _phases_ms(figures), strict=True)), begin_ms)
        self._record("statebackend.checkpoint", begin_ms, end_ms, attributes, phases)

    def _record(
        self,
        name: str,
        begin_ms: float,
        end_ms: float,
        attributes: Mapping[str, Any],
        phases: list[tuple[str, float, float]],
    ) -> None:
        from opentelemetry import context, trace

        span = self._tracer.start_span(
            name,
            context=context.Context(),  # whatever the thread is doing otherwise
            start_time=_ns(begin_ms),
            attributes=dict(attributes),
        )
        inside = trace.set_span_in_context(span, context.Context())
        for phase, start_ms, stop_ms in phases:
            child = self._tracer.start_span(phase, context=inside, start_time=_ns(start_ms))
            child.end(end_time=_ns(stop_ms))
        span.end(end_time=_ns(end_ms))


def _laid_out(timings_ms: Mapping[str, float], at_ms: float) -> list[tuple[str, float, float]]:
    """Phases one after the other: name, start and end."""
    phases = []
    for name, took_ms in timings_ms.items():
        phases.append((name, at_ms, at_ms + took_ms))
        at_ms += took_ms
    return phases


def _phases_ms(figures: Mapping[str, float]) -> list[float]:
    return [figures.get(f"{phase}_ms", 0.0) for phase in _PHASES]


def _took_ms(event: SubtaskProgress) -> float:
    return sum(event.timings_ms.values())


def _ns(at_ms: float) -> int:
    return round(at_ms * _NS_PER_MS)
