"""Metrics and traces for OpenTelemetry, to the providers that the program has set up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Final

from statebackend.errors import EnvironmentMissingError
from statebackend.monitoring.epoch_spans import EpochSpans
from statebackend.monitoring.job_metrics import JobMetrics
from statebackend.monitoring.metric_table import DURATION_BUCKETS_S, JOB_LABEL, METRICS, Metric
from statebackend.monitoring.metric_values import Histogram, Labels
from statebackend.monitoring.observed_job import ObservedJob
from statebackend.texts import install_extra
from statebackend.threads import THREADS

__all__ = ["Telemetry", "check_installed", "telemetry"]

_SCOPE: Final = "statebackend"


def check_installed() -> None:
    """Make sure that there is what it needs.

    Raises:
        EnvironmentMissingError: the package opentelemetry-api is not installed.
    """
    try:
        import opentelemetry.trace  # noqa: F401
    except ImportError as error:
        raise EnvironmentMissingError(
            "spark.statebackend.otel needs the package opentelemetry-api, which is not installed.",
            todo=install_extra("otel", "on the driver"),
        ) from error


class Telemetry:
    """The instruments of this process, and the jobs that they show.

    Args:
        meter, tracer: OpenTelemetry's.

    Attributes:
        made: the one that uses the program's own providers.
    """

    made: ClassVar[Telemetry | None] = None
    lock: ClassVar = THREADS.lock()

    def __init__(self, meter: Any, tracer: Any) -> None:
        self._tracer = tracer
        self._jobs: dict[str, tuple[JobMetrics, Callable[[], None]]] = {}
        self._jobs_lock = THREADS.lock()
        self._durations: dict[str, Any] = {}
        for name, metric in METRICS.items():
            own = f"statebackend.{name.removesuffix('_total')}"
            callbacks = [partial(self._observed, metric)]
            if metric.kind == "histogram":
                self._durations[name] = meter.create_histogram(
                    own,
                    unit="s",
                    description=metric.help,
                    explicit_bucket_boundaries_advisory=list(DURATION_BUCKETS_S),
                )
            elif metric.kind == "counter":
                meter.create_observable_counter(own, callbacks, description=metric.help)
            else:
                meter.create_observable_gauge(own, callbacks, description=metric.help)

    def add(self, observed: ObservedJob) -> None:
        """Watch a job from now on; an earlier start of the same job is forgotten."""
        name, spans = observed.job.name, EpochSpans(self._tracer, observed.job.system.wall_ms)
        with self._jobs_lock:
            before = self._jobs.pop(observed.job.store.uri, None)
            if before is not None:
                before[0].end()
                before[1]()
            metrics = JobMetrics(observed, partial(self._duration, name))
            self._jobs[observed.job.store.uri] = metrics, observed.progress.listen(spans.heard)

    def _duration(self, job: str, name: str, seconds: float, labels: Labels) -> None:
        self._durations[name].record(seconds, _attributes(METRICS[name], job, labels))

    def _observed(self, metric: Metric, options: Any) -> Iterable[Any]:
        """The values of one counter or gauge over all jobs, as OpenTelemetry asks for them.

        Events are counted then, and their durations recorded: OpenTelemetry reads histograms last.
        """
        from opentelemetry.metrics import Observation

        with self._jobs_lock:
            jobs = [metrics for metrics, _ in self._jobs.values()]
        for one in jobs:
            for labels, value in one.values().get(metric.name, {}).items():
                if not isinstance(value, Histogram):
                    yield Observation(value, _attributes(metric, one.job, labels))


def _attributes(metric: Metric, job: str, labels: Labels) -> Mapping[str, str]:
    return {JOB_LABEL: job, **dict(zip(metric.labels, labels, strict=True))}


def telemetry() -> Telemetry:
    """The one of this process, with the providers that the program has set up.

    Raises:
        EnvironmentMissingError: see `check_installed`.
    """
    check_installed()
    from opentelemetry import metrics, trace

    with Telemetry.lock:
        if Telemetry.made is None:
            Telemetry.made = Telemetry(metrics.get_meter(_SCOPE), trace.get_tracer(_SCOPE))
        return Telemetry.made
