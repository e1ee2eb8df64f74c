"""From a topic of Kafka to a topic of Kafka: `python -m bench kafka`.

A count by key on one broker on this machine. Two tables: *at least once*, in which all sides write
into the topic so, and *exactly once*, with those that can. Every side has the same checkpoint
interval, except Spark's micro-batches, which checkpoint with each batch and follow one another at
once. Sides take turns, each in processes of its own; so do the producer and the reader.

*At a rate*: the producer sends so many rows a second, and a row is as late as its answer reaches
the reader after the row was due. *Most*: a side works off a topic that is filled already; the
broker's times of what it appends say how fast. Every side's counts are checked.

A new broker compiles its own code for a minute, on a core that a side would miss. So the topic is
filled first, and the first run at a rate is thrown away. Each round begins with another side.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.kafka.kafka_names import EXACTLY_ONCE, NAMES, SIDES, medians
from bench.kafka.kafka_profile import sampled
from bench.kafka.kafka_sides import (
    Running,
    Tools,
    module_command,
    task_file,
)
from bench.machine import busy_share
from bench.runner import SideFailed
from tests.support.kafka import BROKER_JARS, KafkaCluster
from tests.support.kafkaclient import KafkaClient

__all__ = ["kafka", "kafka_text"]

_TABLES = {"at-least-once": SIDES, "exactly-once": EXACTLY_ONCE}
_SLACK_S = 3.0  # a side that is further behind than a checkpoint and this did not keep up
_JVM = ("-Xmx1g", "-Xms1g")


@dataclass(frozen=True)
class KafkaSizes:
    """How much is measured."""

    rate: int = 2000
    seconds: float = 20.0
    warm_s: float = 8.0
    rows: int = 12_000_000
    most_s: float = 20.0
    most_warm_s: float = 5.0
    keys: int = 100_000
    probe: int = 200
    partitions: int = 2
    checkpoint_s: float = 5.0
    start_s: float = 150.0
    rows_per_batch: int = 500_000  # of Spark's micro-batches while they work off what is there


_QUICK = KafkaSizes(
    rate=1000,
    seconds=8.0,
    warm_s=4.0,
    rows=1_000_000,
    most_s=15.0,
    most_warm_s=1.0,
    keys=1000,
    rows_per_batch=50_000,
)


def kafka(
    *,
    quick: bool,
    rounds: int,
    sides: Sequence[str],
    rate: int | None,
    profile: bool = False,
    work: Path,
    progress: Any,
) -> dict[str, Any]:
    """All rounds.

    Args:
        sides: of `SIDES`. rate: rows a second that are offered; None: the usual one.
        profile: sample the Python processes of sides that work off a topic (they are slower then).
        work: a folder for everything. progress: called with a line when a run has ended.
    """
    sizes = _QUICK if quick else KafkaSizes()
    if rate:
        sizes = KafkaSizes(**asdict(sizes) | {"rate": rate})
    cluster = KafkaCluster(work / "broker", 1, {}, _JVM)
    try:
        cluster.start()
        bench = _Bench(sizes, cluster.bootstrap, profile, work, progress)
        bench.warm(sides[0])
        found = [
            bench.round(sides[n % len(sides) :] + sides[: n % len(sides)]) for n in range(rounds)
        ]
    finally:
        Running.stop_all()
        cluster.stop()
    versions = {"broker": {"kafka": BROKER_JARS.rpartition(":")[2]}} | bench.tools.versions
    return {"sizes": asdict(sizes), "versions": versions, "rounds": found}


class _Bench:
    def __init__(
        self, sizes: KafkaSizes, servers: str, profile: bool, work: Path, progress: Any
    ) -> None:
        self._sizes, self._servers, self._work, self._progress = sizes, servers, work, progress
        self._profile = profile
        self._client = KafkaClient(servers)
        self._filled = ""
        self.tools = Tools(work)

    def round(self, sides: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for table, able in _TABLES.items():
            found[table] = {}
            for side in (one for one in sides if one in able):
                exactly_once = table == "exactly-once"
                one = found[table][side] = {
                    "rate": self._tried(self._at_rate, side, exactly_once=exactly_once),
                    "most": self._tried(self._most, side, exactly_once=exactly_once),
                }
                self._progress(f"{table}, {NAMES[side]}: {_line(one)}")
        return found

    def _tried(self, run: Any, side: str, *, exactly_once: bool) -> dict[str, Any]:
        """What a run found, or why it failed."""
        folder = self._work / "side"
        folder.mkdir()
        os.sync()  # else this side waits for the disk with what the one before has written
        busy = busy_share()
        try:
            found: dict[str, Any] = run(side, exactly_once, folder)
        except Exception as error:  # is a side's result: the other sides go on
            found = {"error": f"{type(error).__name__}: {error}"}
            self._progress(f"{side}: {found['error']}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return found | {"busy_before": busy}

    def _task(self, side: str, exactly_once: bool, folder: Path, source: str) -> dict[str, Any]:
        target = self._client.topic(self._sizes.partitions, message_timestamp_type="LogAppendTime")
        return {
            "side": side,
            "name": "kafka",
            "servers": self._servers,
            "source": source,
            "target": target,
            "topic": target,
            "partitions": self._sizes.partitions,
            "keys": self._sizes.keys,
            "checkpoint_s": self._sizes.checkpoint_s,
            "exactly_once": exactly_once,
            "probe": self._sizes.probe,
            "answered": str(folder / "answered"),
            "sent": str(folder / "sent.json"),
            "work": str(folder),
            "store": f"file://{folder}/store",
        }

    def _at_rate(self, side: str, exactly_once: bool, folder: Path) -> dict[str, Any]:
        sizes = self._sizes
        source = self._client.topic(sizes.partitions)
        task = self._task(side, exactly_once, folder, source)
        rows = sizes.probe + round(sizes.rate * (sizes.warm_s + sizes.seconds))
        limit_s = sizes.start_s + 2 * (sizes.warm_s + sizes.seconds) + 30
        load = {"rows": rows, "rate": sizes.rate, "warm_s": sizes.warm_s, "timeout_s": limit_s}
        sent = {**task, **load, "topic": source, "result": task["sent"], "timeout_s": sizes.start_s}
        read = {**task, **load, "live": True, "result": str(folder / "read.json")}
        started = [Running(self.tools.commands(side, task, "rate"), folder, side)]
        try:
            for name, one in (("reader", read), ("producer", sent)):
                path = task_file(one, folder / f"{name}-task.json")
                started.append(Running([module_command(name, path)], folder, name))
            _wait(started[0], started[1:], limit_s + 60)
        finally:
            for one in started:
                one.stop()
        report = json.loads((folder / "sent.json").read_text(encoding="utf-8"))
        found = {"offered_per_s": sizes.rate, **report, **_read(folder / "read.json")}
        return found | {"sustained": found["behind_at_end_s"] < sizes.checkpoint_s + _SLACK_S}

    def _most(self, side: str, exactly_once: bool, folder: Path) -> dict[str, Any]:
        sizes = self._sizes
        source = self._filled
        task = self._task(side, exactly_once, folder, source)
        more = {"rows_per_batch": sizes.rows_per_batch} if side == "spark" else {}
        running = Running(self.tools.commands(side, task | more, "most"), folder, side)
        try:
            watched = self._watch(running, task["target"], folder)
        finally:
            running.stop()
        read = {
            **task,
            "rows": sizes.rows,
            "warm_s": sizes.most_warm_s,
            "live": False,
            "timeout_s": 300.0,
            "result": str(folder / "read.json"),
        }
        path = task_file(read, folder / "reader-task.json")
        _wait(None, [Running([module_command("reader", path)], folder, "reader")], 360.0)
        return _read(folder / "read.json") | watched

    def warm(self, side: str) -> None:
        """Fill the topic that all sides work off, and have the broker do all that it will do."""
        self._fill()
        self._tried(self._at_rate, side, exactly_once=False)

    def _fill(self) -> None:
        sizes = self._sizes
        folder = self._work / "fill"
        folder.mkdir()
        self._filled = self._client.topic(sizes.partitions)
        task = {
            "servers": self._servers,
            "topic": self._filled,
            "rows": sizes.rows,
            "keys": sizes.keys,
            "rate": None,
            "result": str(folder / "filled.json"),
        }
        path = task_file(task, folder / "fill-task.json")
        _wait(None, [Running([module_command("producer", path)], folder, "producer")], 600.0)

    def _watch(self, running: Running, topic: str, folder: Path) -> dict[str, Any]:
        """Until so long after the first output, or until no more comes; the cores it used."""
        report: dict[str, Any] = {}
        sizes, written, began_s = self._sizes, 0, time.monotonic()
        first_s = grew_s = used_s = 0.0
        while True:
            time.sleep(0.25)
            running.check()
            now_s, found = time.monotonic(), self._client.size(topic, sizes.partitions)
            if found > written:
                written, grew_s, growing_cpu_s = found, now_s, running.cpu_s()
                if not first_s:
                    first_s, used_s = now_s, growing_cpu_s
            if self._profile and first_s and "profile" not in report:
                time.sleep(sizes.most_warm_s)
                report["profile"] = sampled(running.python_pids()[:3], sizes.most_s / 2, folder)
            if not first_s and now_s > began_s + sizes.start_s:
                raise SideFailed(f"it wrote nothing in {sizes.start_s:g} s:\n{running.said()}")
            if first_s and (
                now_s > first_s + sizes.most_s or now_s > grew_s + 3 * sizes.checkpoint_s
            ):
                seconds = max(grew_s - first_s, 0.25)
                return report | {"cores_used": round((growing_cpu_s - used_s) / seconds, 2)}


def _wait(side: Running | None, others: Sequence[Running], limit_s: float) -> None:
    """Until the others have ended.

    Raises:
        SideFailed: one of them failed, the side ended before them, or it took too long.
    """
    until_s = time.monotonic() + limit_s
    try:
        while sum(one.ended() for one in others) < len(others):  # asks each: it may have failed
            if side is not None:
                side.check()
            if time.monotonic() > until_s:
                raise SideFailed(f"it took over {limit_s:g} s")
            time.sleep(0.1)
    except SideFailed as error:
        raise SideFailed(f"{error}\n{side.said() if side is not None else ''}") from None
    finally:
        if side is None:
            for one in others:
                one.stop()


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _line(one: dict[str, Any]) -> str:
    rate, most = one["rate"], one["most"]
    at = "failed" if "error" in rate else f"p50 {rate['p50_ms']} ms, p99 {rate['p99_ms']} ms"
    return f"{at}; " + ("failed" if "error" in most else f"{most['rows_per_s']:,.0f} rows/s")


def kafka_text(found: dict[str, Any]) -> str:
    """Tables."""
    sizes = found["sizes"]
    lines = [
        f"Kafka to Kafka, keyed count, {sizes['keys']:,} keys, {sizes['partitions']} partitions, "
        f"a checkpoint each {sizes['checkpoint_s']:g} s, at {sizes['rate']:,} rows/s and at most"
    ]
    for side, of in found["versions"].items():
        lines.append(f"  {side}: {', '.join(f'{name} {version}' for name, version in of.items())}")
    for table in _TABLES:
        lines += ["", f"{table:<26}{'p50 ms':>10}{'p99 ms':>10}{'rows/s':>12}"]
        for side in found["rounds"][0][table]:
            values = medians(found["rounds"], table, side)
            cells = [
                "failed" if value is None else f"{value:,.{0 if name == 'rows_per_s' else 1}f}"
                for name, value in values.items()
            ]
            lines.append(f"{NAMES[side]:<26}{cells[0]:>10}{cells[1]:>10}{cells[2]:>12}")
            lines += _profiles(found["rounds"][0][table][side]["most"])
    return "\n".join(lines)


def _profiles(most: dict[str, Any]) -> list[str]:
    return [
        line
        for name, of in most.get("profile", {}).items()
        for line in (f"    {name}:", *(f"      {one}" for one in of))
    ]
