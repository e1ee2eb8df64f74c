"""A driver of a drill that runs a continuous job.

The job's sources go on for ever while the drill feeds them; once the stop file is there, they end
with what there is by then, and with them the job.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from recovery.decide.restart_strategy import FailureRate
from recovery.drill.driver.driver_messages import DriverConfig, Event, Events
from recovery.drill.jobs.named_functions import function_at
from statebackend.continuous.job.flow import Flow
from statebackend.continuous.job.graph import SourceVertex
from statebackend.continuous.job.streams import ContinuousStream
from statebackend.continuous.sinks.file_sink import FileSink
from statebackend.continuous.sources.source import Discovery, Json, Source, Split, SplitReader
from statebackend.errors import SettingError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from statebackend.continuous.driver.continuous_query import ContinuousQuery

__all__ = ["EndingSource", "let_end", "run"]

_LOOK_EVERY_S: Final = 0.1
# Faults fail a job over and over while they last; one that never gets up again is to be seen.
_RESTART: Final = FailureRate(failures=15, per_s=120.0, delay_s=0.5)
_INTERVAL_S: Final = 1.0
_SINK: Final = "drill"


class EndingSource(Source):
    """A source that ends with the splits that are there once a file is: the last look is after it.

    Args:
        source: it goes on for ever. stop: the file.
    """

    def __init__(self, source: Source, stop: Path) -> None:
        super().__init__(
            source.schema,
            bounded=source.bounded,
            event_time=source.event_time,
            idle_after_s=source.idle_after_s,
        )
        self.watermark_delay_ms = source.watermark_delay_ms
        self.splits_end = source.splits_end
        self._source, self._stop = source, str(stop)

    def discover(self, state: Json | None) -> Discovery:
        """As the source does."""
        stopping = Path(self._stop).exists()  # first: what is found after it is all there is
        found = self._source.discover(state)
        return replace(found, done=True) if stopping else found

    def open(self, split: Split, position: Json | None) -> SplitReader:
        """As the source does."""
        return self._source.open(split, position)


class _Watch:
    """Tells what is new of a running job."""

    def __init__(self, query: ContinuousQuery, events: Events, commits: Path) -> None:
        self._query, self._events, self._commits = query, events, commits
        self._commits.mkdir(parents=True, exist_ok=True)
        self._restores = self._restarts = 0
        self._checkpoint = -1

    def look(self) -> None:
        for one in self._query.checkpoints():
            if one.checkpoint > self._checkpoint:
                self._checkpoint = one.checkpoint
                if not one.aborted:
                    (self._commits / str(one.epoch)).touch()
        restores = self._query.restores()
        for report in restores[self._restores :]:
            self._events.tell(Event(kind="restore", restore=report))
        self._restores = max(self._restores, len(restores))
        while self._restarts < self._query.restarts:
            self._restarts += 1
            self._events.tell(Event(kind="restarted"))


def run(spark: SparkSession, config: DriverConfig, events: Events) -> None:
    """Until the job has ended, and the stop file is there."""
    from statebackend.backend import StateBackend

    stop = Path(config.stop)
    backend = StateBackend(
        spark, uri=config.uri, job=config.job, local_dir=config.local_dir, settings=config.settings
    )
    stream = function_at(config.build)(spark, backend, Path(config.root))
    if not isinstance(stream, ContinuousStream):
        raise SettingError(
            f"{config.build} gives a {type(stream).__name__}, and the drill is of a continuous "
            f"job.",
            todo="Return the ContinuousStream whose rows are to be checked, or leave kind= out.",
        )
    let_end(stream.flow, stop)
    stream.sink(FileSink(config.out), uid=_SINK)
    options: dict[str, Any] = {"restart": _RESTART, **config.start}
    if "checkpoint_interval_s" not in options:  # its name in earlier releases
        options.setdefault("checkpoint_interval", _INTERVAL_S)
    query = stream.start(parallelism=config.parallelism, **options)
    events.tell(Event(kind="ready"))
    watch = _Watch(query, events, Path(config.checkpoint) / "commits")
    while not query.await_termination(_LOOK_EVERY_S):
        watch.look()
    watch.look()
    if not stop.exists():
        events.tell(Event(kind="idle"))  # it has read all there is, and is fed no more
    while not stop.exists():
        time.sleep(_LOOK_EVERY_S)


def let_end(flow: Flow, stop: Path) -> None:
    """Have the sources of a job that go on for ever end once a file is there."""
    for uid, vertex in list(flow.sources.items()):
        if not vertex.source.bounded:
            flow.sources[uid] = SourceVertex(uid, EndingSource(vertex.source, stop))
