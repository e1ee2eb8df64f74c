"""The driver of a drill: `python -m recovery.drill.child <file>`, a process that may be killed.

It runs one job until the stop file is there and all input has been read, and appends what happens
to a file of events, one JSON object in a line.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from recovery.drill import sink
from recovery.drill.told import REBALANCE, SAVEPOINT, SAVEPOINT_ANSWER, Event, Taken, Told
from statebackend.errors import UnsupportedQueryError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from statebackend.spark.backend import StateBackend

__all__ = ["main"]

_LOOK_EVERY_S: Final = 0.2
_AGAIN_S: Final = 1.0
_DURABLE_WITHIN_S: Final = 120.0
_SAVEPOINT_WITHIN_S: Final = 240.0
# Short lives on few cores: what the JVM would spend on optimising its code is half of all the time.
_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class _Events:
    """The file of events; each is there as soon as it is told."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def tell(self, event: Event) -> None:
        self._file.write(msgspec.json.encode(event) + b"\n")


class _Watch:
    """Tells what is new of a running query."""

    def __init__(
        self,
        backend: StateBackend,
        query: StreamingQuery,
        events: _Events,
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
            logging.getLogger("recovery.drill").exception("no savepoint")
            taken = Taken(error=f"{type(error).__name__}: {error}")
        draft = self._answer.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(taken))
        self._savepoint.unlink(missing_ok=True)  # first: who has the answer may ask again at once
        draft.rename(self._answer)


def main() -> None:
    """Run a driver as it is told."""
    told = Told.read(Path(sys.argv[1]))
    logging.basicConfig(level=logging.INFO)
    _end_with_the_parent()
    events = _Events(Path(told.events))
    try:
        _run(told, events)
    except BaseException as error:
        logging.getLogger("recovery.drill").exception("the driver failed")
        text = f"{type(error).__name__}: {error}"
        events.tell(Event(kind="failed", error=text[:4000]))
        # At once, and without a tidy end that a broken session might never come to: the JVM ends
        # with its standard input.
        os._exit(1)
    events.tell(Event(kind="finished"))


def _run(told: Told, events: _Events) -> None:
    from statebackend.spark.backend import StateBackend

    root = Path(told.root)
    spark = _session(told)
    backend = StateBackend(
        spark,
        uri=told.uri,
        job=told.job,
        local_dir=told.local_dir,
        parallelism=told.parallelism,
        commit=told.commit,
        settings=told.settings,
        savepoint=told.savepoint or None,
    )
    frame = _function(told.build)(spark, backend, root)
    write = backend.checked(sink.writer(Path(told.out)))
    stream = frame.writeStream.foreachBatch(write)
    query = backend.start(stream.option("checkpointLocation", told.checkpoint))
    events.tell(Event(kind="ready"))
    watch = _Watch(backend, query, events, root, lambda: _doubt(frame))
    stop = Path(told.stop)
    while not stop.exists():
        if query.awaitTermination(_LOOK_EVERY_S):  # type: ignore[arg-type] # fractions do
            raise RuntimeError("The query ended by itself.")
        watch.look()
    _finish(query, watch)
    backend.wait_durable(_DURABLE_WITHIN_S)
    watch.look()
    spark.stop()


def _doubt(frame: DataFrame) -> str:
    """Why a clone need not read on exactly; empty if it must."""
    from statebackend.spark.savepoints import EXACT_SOURCES
    from statebackend.spark.sources import sources_of

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


def _session(told: Told) -> SparkSession:
    from pyspark.sql import SparkSession

    scratch = Path(told.root) / "scratch"
    scratch.mkdir(exist_ok=True)
    conf = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "WARN",
        "spark.sql.shuffle.partitions": str(told.parallelism),
        "spark.shuffle.reduceLocality.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": f'{_JAVA} "-Djava.io.tmpdir={scratch}"',
        "spark.executor.extraJavaOptions": _JAVA,
        "spark.local.dir": str(scratch),
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.sql.session.timeZone": "UTC",
        # Subtasks go where executors are when the frame is made: all must be there.
        "spark.cores.max": "2",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        # A master gives a job up whose executors die one after the other. Here they do.
        "spark.deploy.maxExecutorRetries": "-1",
        **told.conf,
    }
    builder = SparkSession.builder.master(told.master).appName("drill")
    for key, value in conf.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _function(name: str) -> Any:
    """`module:name`, from the modules that can be imported here."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _end_with_the_parent() -> None:
    """The drill holds the other end of our standard input: when it is gone, so are we."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # without waiting for whatever thread a job may have left
