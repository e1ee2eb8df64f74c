"""Values of metrics: counters, gauges and histograms by their labels."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from statebackend.monitoring.metric_table import DURATION_BUCKETS_S

__all__ = ["Histogram", "Labels", "MetricValues", "Values"]

Labels = tuple[str, ...]


@dataclass
class Histogram:
    """Durations by bucket; the last count is of those above all buckets."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(DURATION_BUCKETS_S) + 1))
    sum_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Add one duration."""
        self.counts[bisect_left(DURATION_BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    def copy(self) -> Histogram:
        """As it is now."""
        return Histogram(list(self.counts), self.sum_s)


Values = dict[Labels, float] | dict[Labels, Histogram]
_NOTHING: Final[Callable[[str, float, Labels], None]] = lambda name, value, labels: None  # noqa: E731


class MetricValues:
    """The values of one job's metrics, by name and labels (the job's left out). Not thread-safe.

    Args:
        observed: called with each duration as well: the metric's name, seconds, labels.
    """

    def __init__(self, observed: Callable[[str, float, Labels], None] = _NOTHING) -> None:
        self._numbers: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, dict[Labels, Histogram]] = {}
        self._observed = observed

    def add(self, name: str, value: float, *labels: str) -> None:
        """Raise a counter."""
        values = self._numbers.setdefault(name, {})
        values[labels] = values.get(labels, 0) + value

    def set(self, name: str, value: float | None, *labels: str) -> None:
        """Set a gauge, or a counter that is kept elsewhere; None: it is absent."""
        values = self._numbers.setdefault(name, {})
        if value is None:
            values.pop(labels, None)
        else:
            values[labels] = value

    def observe(self, name: str, seconds: float, *labels: str) -> None:
        """Add a duration to a histogram."""
        by_labels = self._histograms.setdefault(name, {})
        found = by_labels.get(labels)
        if found is None:
            found = by_labels[labels] = Histogram()
        found.observe(seconds)
        self._observed(name, seconds, labels)

    def copied(self) -> dict[str, Values]:
        """All values as they are now, by name."""
        return {
            **{name: dict(values) for name, values in self._numbers.items()},
            **{
                name: {labels: one.copy() for labels, one in by_labels.items()}
                for name, by_labels in self._histograms.items()
            },
        }
