"""What it costs to be watched: `python -m bench monitoring`.

The same query with metrics, OpenTelemetry, a `ProgressListener` and the page of the job, and
without any of them, in turn. A thread of the driver reads the metrics every 15 seconds, as
Prometheus does by default, and another one the page every 5 seconds, as a browser does that shows
it. The time of a batch says what a user waits for. The driver's processor time says more on a
machine that others use, too; the threads that read are in it.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.data import write_batches
from bench.query import Job
from bench.s3 import place
from bench.side import session

__all__ = ["monitoring", "monitoring_text"]

_KEYS = 20_000
_WARM = 3
_READ_EVERY_S, _LOOK_EVERY_S = 15.0, 5.0


def monitoring(
    *, batches: int, rounds: int, work: Path, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Pairs of runs; ``progress`` is called with a line when a run has ended."""
    source = write_batches(work / "in", keys=_KEYS, rows=_KEYS, full=batches)
    partitions = 2
    spark = session({"side": "monitoring", "work": str(work), "partitions": partitions})
    spark.conf.set("spark.sql.shuffle.partitions", str(partitions))
    ports = _free_port(), _free_port()
    pairs: list[dict[str, Any]] = []
    try:
        with place(work / "s3") as server:
            make = partial(Job, spark, source=source, endpoint=server.url, partitions=partitions)
            _run(make(work / "warm", uri=server.uri("warm")), None)
            for number in range(rounds):
                pair = {}
                for side in ("plain", "watched")[:: 1 if number % 2 else -1]:
                    name = f"run-{number}-{side}"
                    job = make(work / name, uri=server.uri(name))
                    pair[side] = _run(job, ports if side == "watched" else None)
                    progress(f"monitoring, round {number + 1}/{rounds}, {side}: {pair[side]}")
                pairs.append(pair)
    finally:
        spark.stop()
    found: dict[str, Any] = {"keys": _KEYS, "batches": batches, "rounds": pairs}
    for name in ("batch_ms", "driver_cpu_ms"):
        shares = [100 * (one["watched"][name] / one["plain"][name] - 1) for one in pairs]
        found[f"{name}_more_percent"] = round(statistics.median(shares), 1)
    return found


def _run(job: Job, ports: tuple[int, int] | None) -> dict[str, float]:
    """One run to the end of the input: medians over its batches."""
    from statebackend import ProgressListener

    spark = job.spark
    if ports is not None:
        job.settings.update({"metrics_port": ports[0], "ui_port": ports[1], "otel": 1})
    listener, cpu_s = ProgressListener(lambda event: None), list[float]()
    with contextlib.ExitStack() as stack:
        if ports is not None:
            spark.streams.addListener(listener)
            stack.callback(spark.streams.removeListener, listener)
            metrics, page = (f"http://127.0.0.1:{port}/" for port in ports)
            stack.enter_context(_reader(f"{metrics}metrics", _READ_EVERY_S))
            stack.enter_context(_reader(f"{page}jobs/bench/", _LOOK_EVERY_S))
        _, query = job.run(lambda batch: cpu_s.append(time.process_time()))
    durations = [
        p["durationMs"]["triggerExecution"]
        for p in query.recentProgress
        if p["batchId"] >= _WARM and p["numInputRows"]
    ]
    spent = [after - before for before, after in pairwise(cpu_s)][_WARM:]
    return {
        "batch_ms": round(statistics.median(durations), 1),
        "driver_cpu_ms": round(1000 * statistics.mean(spent), 2),
    }


@contextlib.contextmanager
def _reader(url: str, every_s: float) -> Iterator[None]:
    """While open, somebody reads what is at a URL now and then."""
    over, reads = threading.Event(), 0

    def read() -> None:
        nonlocal reads
        while not over.wait(every_s if reads else 1.0):  # soon for the first time
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url, timeout=5).read()
                reads += 1

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if not reads:
        raise RuntimeError(f"{url} was never read: the run was too short, or nothing is there")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def monitoring_text(found: dict[str, Any]) -> str:
    """The figures to read."""
    lines = [
        f"Monitoring: counter, {found['keys']:,} keys, all changed in each of {found['batches']} "
        f"batches, {_WARM} of them warm-up; metrics, the page, OpenTelemetry, a listener"
    ]
    for name, what in (("batch_ms", "a batch"), ("driver_cpu_ms", "processor time of the driver")):
        sides = {
            side: statistics.median(one[side][name] for one in found["rounds"])
            for side in ("plain", "watched")
        }
        more = found[f"{name}_more_percent"]
        lines.append(f"  {what}: {sides['plain']} ms, watched {sides['watched']} ms ({more:+} %)")
    return "\n".join(lines)
