"""Spark's progress events with our operators in them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from pyspark import SparkContext
from pyspark.sql.streaming.listener import (
    JStreamingQueryListener,
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StateOperatorProgress,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from snapshot.log.state_operators import StateOperator, idle, state_operators
from statebackend.runtime.driver.services import Services

__all__ = ["ProgressListener"]

_log = logging.getLogger("statebackend.spark")


class _EventsAsJson(JStreamingQueryListener):
    """Takes an event over in one call to the JVM.

    PySpark asks for each field by itself: a hundred calls, and 20 ms of a core for each batch.
    Observed metrics are left to it: JSON knows no timestamps, decimals or intervals.
    """

    def onQueryProgress(self, jevent: Any) -> None:
        """A batch has ended."""
        said = jevent.progress()
        if said.observedMetrics().isEmpty():
            progress = StreamingQueryProgress.fromJson(json.loads(said.json()))
        else:
            progress = StreamingQueryProgress.fromJObject(said)
        self.pylistener.onQueryProgress(QueryProgressEvent(progress))


class ProgressListener(StreamingQueryListener):
    """A listener for ``spark.streams.addListener``.

    Spark sees no state in a query of ours, so its ``stateOperators`` are empty. This listener hands
    each of Spark's progress events to a callback, with the operators of this library in it.

    Args:
        callback: given Spark's ``StreamingQueryProgress``. It is called in Spark's listener thread.
            What it raises is logged, and the query goes on.
    """

    def __init__(self, callback: Callable[[StreamingQueryProgress], None]) -> None:
        self._callback = callback

    @property
    def _jlistener(self) -> Any:
        """What Spark's JVM calls."""
        if not hasattr(self, "_jlistenerobj"):
            jvm = SparkContext._jvm
            assert jvm is not None
            self._jlistenerobj = jvm.PythonStreamingQueryListenerWrapper(_EventsAsJson(self))
        return self._jlistenerobj

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Nothing to tell."""

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Nothing to tell."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Nothing to tell."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """A batch has ended."""
        try:
            self._callback(_with_ours(event.progress))
        except Exception:
            _log.exception("the callback of a ProgressListener failed")


def _with_ours(progress: StreamingQueryProgress) -> StreamingQueryProgress:
    """An event with our operators behind Spark's own; the same where the query has none."""
    ours = _operators_in(str(progress.id), progress.batchId)
    if not ours:
        return progress
    said = json.loads(progress.json)
    said["stateOperators"] = [*said.get("stateOperators", []), *ours]
    made = dict(progress)
    own = [StateOperatorProgress.fromJson(dict(one)) for one in ours]
    made["stateOperators"] = [*progress.stateOperators, *own]
    return StreamingQueryProgress(**made, jdict=said)


def _operators_in(query_id: str, batch: int) -> list[StateOperator]:
    """The operators of a query of this driver in a batch, or as they were before it."""
    for known in list(Services.running.values()):
        session = known.session
        if session.looked_at(lambda run: run.query_id) != query_id:
            continue
        book = session.progress.summary(session.epoch)
        if found := state_operators(book.epochs, book.subtasks, batch):
            return found
        before = max((one.epoch for one in book.subtasks if one.epoch < batch), default=None)
        if before is not None:
            return [idle(one) for one in state_operators(book.epochs, book.subtasks, before)]
    return []
