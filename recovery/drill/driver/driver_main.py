"""A drill's driver, which may be killed: `python -m recovery.drill.driver.driver_main <file>`.

It runs one job until the stop file is there and all input has been read, and appends what happens
to a file of events, one JSON object in a line.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from recovery.drill.cluster.local_cluster import SHORT_LIVED
from recovery.drill.driver.driver_messages import DriverConfig, Event, Events
from recovery.drill.jobs.job_kinds import KINDS
from recovery.drill.jobs.named_functions import function_at

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["main"]


def main() -> None:
    """Run a driver as it is told."""
    config = DriverConfig.read(Path(sys.argv[1]))
    logging.basicConfig(level=logging.INFO)
    _end_with_the_parent()
    events = Events(Path(config.events))
    try:
        _run(config, events)
    except BaseException as error:
        logging.getLogger("statebackend.drill").exception("the driver failed")
        text = f"{type(error).__name__}: {error}"
        events.tell(Event(kind="failed", error=text[:4000]))
        # At once, and without a tidy end that a broken session might never come to: the JVM ends
        # with its standard input.
        os._exit(1)
    events.tell(Event(kind="finished"))


def _run(config: DriverConfig, events: Events) -> None:
    spark = _session(config)
    function_at(KINDS[config.kind].driver)(spark, config, events)
    spark.stop()


def _session(config: DriverConfig) -> SparkSession:
    from pyspark.sql import SparkSession

    scratch = Path(config.root) / "scratch"
    scratch.mkdir(exist_ok=True)
    conf = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "WARN",
        "spark.sql.shuffle.partitions": str(config.parallelism),
        "spark.shuffle.reduceLocality.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": f'{SHORT_LIVED} "-Djava.io.tmpdir={scratch}"',
        "spark.executor.extraJavaOptions": SHORT_LIVED,
        "spark.local.dir": str(scratch),
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.sql.session.timeZone": "UTC",
        # Subtasks go where executors are when the frame is made: all must be there.
        "spark.cores.max": "2",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "600s",
        # A master gives a job up whose executors die one after the other. Here they do.
        "spark.deploy.maxExecutorRetries": "-1",
        **config.conf,
    }
    builder = SparkSession.builder.master(config.master).appName("drill")
    for key, value in conf.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


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
