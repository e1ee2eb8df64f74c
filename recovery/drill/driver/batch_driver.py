"""A driver of a drill that runs a streaming query, in micro-batches."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from recovery.drill.driver.driver_messages import (
    REBALANCE,
    SAVEPOINT,
    SAVEPOINT_ANSWER,
    DriverConfig,
    Event,
    Events,
    Taken,
)
from recovery.drill.jobs import batch_sink as sink
from recovery.drill.jobs.named_functions import function_at
from statebackend.errors import UnsupportedQueryError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from statebackend.backend import StateBackend

__all__ = ["run"]

_LOOK_EVERY_S: Final = 0.2
_AGAIN_S: Final = 1.0
_DURABLE_WITHIN_S: Final = 120.0
_SAVEPOINT_WITHIN_S: Final = 240.0


def run(spark: SparkSession, config: DriverConfig, events: Events) -> None:
    """Until the stop file is there and all input has been read."""
    from statebackend.backend import StateBackend

    root = Path(config.root)
    backend = StateBackend(
        spark,
        uri=config.uri,
        job=config.job,
        local_dir=config.local_dir,
        parallelism=config.parallelism,
        commit=config.commit,
        settings=config.settings,
        savepoint=config.savepoint or None,
    )
    frame = function_at(config.build)(spark, backend, root)
    write = backend.checked(sink.writer(Path(config.out)))
    stream = frame.writeStream.foreachBatch(write)
    query = backend.start(stream.option("checkpointLocation", config.checkpoint))
    events.tell(Event(kind="ready"))
    watch = _Watch(backend, query, events, root, lambda: _doubt(frame))
    stop = Path(config.stop)
    while not stop.exists():
        if query.awaitTermination(_LOOK_EVERY_S):  # type: ignore[arg-type] # fractions do
            raise RuntimeError("The query ended by itself.")
        watch.look()
    _finish(query, watch)
    backend.wait_durable(_DURABLE_WITHIN_S)
    watch.look()


class _Watch:
    """Tells what is new of a running query."""

    def __init__(
        self,
        backend: StateBackend,
        query: StreamingQuery,
        events: Events,
        root: Path,
        doubt: Callable[[], str],
    ) -> None:
        self._backend, self._query, self._events = backend, query, events
        self._doubt = doubt
        self._rebalance = root / REBALANCE
        self._savepoint, self._answer = root / SAVEPOINT, root / SAVEPOINT_ANSWER
        self._restores = 0
        self._epoch: int | None = None
        self._idle = False

    def look(self) -> None:
        restores = self._backend.restores()
        for report in restores[self._restores :]:
            self._events.tell(Event(kind="restore", restore=report))
        self._restores = len(restores)
        epoch = self._backend.epoch
        if epoch is not None and epoch != self._epoch:
            self._epoch = epoch
            self._events.tell(Event(kind="epoch", epoch=epoch))
        if self._rebalance.exists():
            self._place_anew(int(self._rebalance.read_text()))
        if self._savepoint.exists():
            self._save(self._savepoint.read_text())
        # The whole of Spark's words for it: a source or a sink may say "Waiting" too.
        idle = self._query.status["message"] == "Waiting for data to arrive"
        if idle != self._idle:
            self._idle = idle
            self._events.tell(Event(kind="idle" if idle else "busy"))

    def _place_anew(self, executors: int) -> None:
        """By hand, and again with the next look if so many executors have not registered yet."""
        self._backend.rebalance()
        last = self._backend.progress().last_rebalance
        if last is None or not last.executors_after or len(last.executors_after) >= executors:
            self._rebalance.unlink()
        else:
            time.sleep(_AGAIN_S)

    def _save(self, to: str) -> None:
        """Take a savepoint; the query has threads of its own and goes on meanwhile."""
        try:
            made = self._backend.savepoint(to or None, timeout_s=_SAVEPOINT_WITHIN_S)
            taken = Taken(uri=made.uri, epoch=made.epoch, cannot=self._doubt())
        except UnsupportedQueryError as error:
            taken = Taken(cannot=str(error))
        except Exception as error:  # whatever it is: the drill says it
            logging.getLogger("statebackend.drill").exception("no savepoint")
            taken = Taken(error=f"{type(error).__name__}: {error}")
        draft = self._answer.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(taken))
        self._savepoint.unlink(missing_ok=True)  # first: who has the answer may ask again at once
        draft.rename(self._answer)


def _doubt(frame: DataFrame) -> str:
    """Why a clone need not read on exactly; empty if it must."""
    from statebackend.spark.frames.repeatable_sources import sources_of
    from statebackend.spark.start.query_from_savepoint import EXACT_SOURCES

    for source in sources_of(frame):
        if source.name not in EXACT_SOURCES or source.cleans:
            return f"of the source {source.shown} it is not known whether a clone reads on exactly"
    return ""


def _finish(query: StreamingQuery, watch: _Watch) -> None:
    """Read all input, and keep telling meanwhile."""
    failed: list[BaseException] = []

    def read_all() -> None:
        try:
            query.processAllAvailable()
        except BaseException as error:
            failed.append(error)

    reader = threading.Thread(target=read_all, daemon=True)
    reader.start()
    while reader.is_alive():
        reader.join(_LOOK_EVERY_S)
        watch.look()
    if failed:
        raise failed[0]
    query.stop()
    watch.look()
