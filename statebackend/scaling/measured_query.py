"""A running query, as the rescaler sees it: measured, and stopped between two batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, Protocol

from pyspark.sql.streaming.query import StreamingQuery

from statebackend import system
from statebackend.backend import StateBackend
from statebackend.scaling.load_meter import Meter, state_bytes_of
from statebackend.scaling.rescale_policy import Load

__all__ = ["SparkQuery", "Watched"]

_POLL_S: Final = 0.1
_BETWEEN_BATCHES_S: Final = 60.0


class Watched(Protocol):
    """What the rescaler asks of a query."""

    @property
    def job(self) -> str:
        """The job's name."""

    @property
    def parallelism(self) -> int:
        """Subtasks per operator."""

    @property
    def max_parallelism(self) -> int:
        """Key groups."""

    def cores(self) -> int | None:
        """Of the cluster; None: not known, or as many as are asked for."""

    def active(self) -> bool:
        """Whether it runs."""

    def error(self) -> BaseException | None:
        """What it ended with; None for a good end."""

    def has_run(self) -> bool:
        """Whether it has finished a batch."""

    def measure(self, at_s: float) -> list[Load]:
        """What is new."""

    def stop(self) -> None:
        """Stop it between two batches; when this returns, all of it is durable.

        Raises:
            StateBackendError: it is not.
        """


class SparkQuery:
    """A query of Spark's and its backend; see `Watched`.

    Args:
        batch_target_s: see `RescalePolicy`.
    """

    def __init__(
        self,
        backend: StateBackend,
        query: StreamingQuery,
        *,
        batch_target_s: float,
        now_s: Callable[[], float] = system.monotonic_s,
        sleep_s: Callable[[float], None] = system.sleep_s,
    ) -> None:
        self.backend, self.query = backend, query
        self._meter = Meter(batch_target_s=batch_target_s)
        self._now_s, self._sleep_s = now_s, sleep_s

    @property
    def job(self) -> str:
        """See `Watched`."""
        return self.backend.job

    @property
    def parallelism(self) -> int:
        """See `Watched`."""
        return self.backend.parallelism

    @property
    def max_parallelism(self) -> int:
        """See `Watched`."""
        return self.backend.max_parallelism

    def cores(self) -> int | None:
        """See `Watched`. Executors that come by themselves bring as many as are needed."""
        context = self.backend.spark.sparkContext
        conf = context.getConf()
        if conf.get("spark.dynamicAllocation.enabled", "false") == "true":
            return None
        if conf.get("spark.default.parallelism") is not None:
            return None  # what Spark would say of its cores is that
        return context.defaultParallelism // int(conf.get("spark.task.cpus", "1") or 1)

    def active(self) -> bool:
        """See `Watched`."""
        return bool(self.query.isActive)

    def error(self) -> BaseException | None:
        """See `Watched`."""
        return self.backend.failure or self.query.exception()

    def has_run(self) -> bool:
        """See `Watched`."""
        return any("addBatch" in (one.get("durationMs") or {}) for one in self._progresses())

    def measure(self, at_s: float) -> list[Load]:
        """See `Watched`."""
        state_bytes = state_bytes_of(self.backend.progress())
        return self._meter.measure(self._progresses(), at_s=at_s, state_bytes=state_bytes)

    def stop(self) -> None:
        """See `Watched`. Where batches follow each other at once, the next has just begun."""
        until_s = self._now_s() + _BETWEEN_BATCHES_S
        before = self._last_batch()
        while self.query.isActive and self._now_s() < until_s:
            if not self.query.status["isTriggerActive"] or self._last_batch() != before:
                break
            self._sleep_s(_POLL_S)
        self.query.stop()
        self.backend.wait_durable()
        self.backend.close()

    def _last_batch(self) -> Any:
        last = self.query.lastProgress
        return None if last is None else (last["batchId"], last["timestamp"])

    def _progresses(self) -> list[dict[str, Any]]:
        return [json.loads(one.json) for one in self.query.recentProgress]
