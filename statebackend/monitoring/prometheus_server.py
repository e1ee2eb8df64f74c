"""Serves the metrics of this process's jobs to Prometheus, from one port."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, ClassVar, Final

from statebackend.errors import EnvironmentMissingError, SettingError
from statebackend.monitoring.job_metrics import JobMetrics
from statebackend.monitoring.metric_table import DURATION_BUCKETS_S, JOB_LABEL, METRICS, Metric
from statebackend.monitoring.metric_values import Histogram, Values
from statebackend.monitoring.observed_job import ObservedJob
from statebackend.texts import install_extra
from statebackend.threads import THREADS

__all__ = ["MetricsServer", "check_installed", "metrics_server"]

_BOUNDS: Final = (*(f"{bound:g}" for bound in DURATION_BUCKETS_S), "+Inf")


def check_installed() -> None:
    """Make sure that there is what the metrics need.

    Raises:
        EnvironmentMissingError: the package prometheus-client is not installed.
    """
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise EnvironmentMissingError(
            "spark.statebackend.metrics.port needs the package prometheus-client, which is not "
            "installed.",
            todo=install_extra("metrics", "on the driver"),
        ) from error


class MetricsServer:
    """One address, and the metrics of all jobs that asked for it: a collector of Prometheus's.

    Attributes:
        made: those of this process, by host and port. It lives as long as the process: what was
            counted of a job that has failed can still be asked for.
    """

    made: ClassVar[dict[tuple[str, int], MetricsServer]] = {}
    lock: ClassVar = THREADS.lock()

    def __init__(self, host: str, port: int) -> None:
        """Listen.

        Raises:
            SettingError: the port is in use, or the host is none of this machine's.
            EnvironmentMissingError: see `check_installed`.
        """
        check_installed()
        from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

        self._jobs: dict[str, JobMetrics] = {}  # by the job's folder
        self._jobs_lock = THREADS.lock()
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        try:
            self._http = start_http_server(port, host, registry)
        except OSError as error:
            raise SettingError(
                f"The metrics cannot be served at {host}:{port}: {error.strerror or error}.",
                todo="Give spark.statebackend.metrics.port a free port, and "
                "spark.statebackend.metrics.host an address of this machine.",
            ) from error

    def add(self, observed: ObservedJob) -> None:
        """Watch a job from now on; an earlier start of the same job is forgotten."""
        with self._jobs_lock:
            before = self._jobs.pop(observed.job.store.uri, None)
            if before is not None:
                before.end()
            self._jobs[observed.job.store.uri] = JobMetrics(observed)

    def collect(self) -> Iterator[Any]:
        """All metrics of all jobs, as Prometheus's registry asks for them."""
        with self._jobs_lock:
            jobs = list(self._jobs.values())
        found = [(one.job, one.values()) for one in jobs]
        for metric in METRICS.values():
            family = _family(metric)
            for job, values in found:
                _fill(family, job, values.get(metric.name, {}))
            if family.samples:
                yield family


def metrics_server(host: str, port: int) -> MetricsServer:
    """The one of this process at an address; made when it is first asked for.

    Raises:
        SettingError, EnvironmentMissingError: as `MetricsServer`.
    """
    with MetricsServer.lock:
        known = MetricsServer.made.get((host, port))
        if known is None:
            known = MetricsServer.made[host, port] = MetricsServer(host, port)
        return known


def _family(metric: Metric) -> Any:
    from prometheus_client import core

    kinds = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    return kinds[metric.kind](metric.full_name, metric.help, labels=(JOB_LABEL, *metric.labels))


def _fill(family: Any, job: str, values: Values) -> None:
    for labels, value in values.items():
        if isinstance(value, Histogram):
            buckets = list(zip(_BOUNDS, accumulate(value.counts), strict=True))
            family.add_metric((job, *labels), buckets=buckets, sum_value=value.sum_s)
        else:
            family.add_metric((job, *labels), value)
