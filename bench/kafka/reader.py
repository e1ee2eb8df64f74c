"""The reader of the output topic, in a process of its own: `... bench.kafka.reader TASK.json`.

It knows nothing of who wrote the topic. With ``live`` it reads until all rows are counted, and an
output has the time at which it came here. Otherwise it reads what there is up to the end, and an
output has the time at which the broker appended it, so that no reader disturbs what is measured.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from confluent_kafka import Consumer, Message, TopicPartition

from bench.continuousjob import dumped
from bench.kafka.answers import Outputs, checked, latencies, rows_per_s

__all__ = ["run"]

_BATCH = 20_000
_LOOK_S = 0.2


class _Counted(msgspec.Struct):
    k: int
    n: int


class _Seen:
    """What came, and how far all keys have come."""

    def __init__(self, keys: int) -> None:
        self._pieces: list[tuple[Any, Any, Any]] = []
        self._last = np.zeros(keys, np.int64)
        self._decode = msgspec.json.Decoder(list[_Counted]).decode

    def take(self, messages: list[Any], now_us: int | None) -> None:
        found = self._decode(b"[" + b",".join(map(Message.value, messages)) + b"]")
        keys = np.fromiter((one.k for one in found), np.int64, len(found))
        counts = np.fromiter((one.n for one in found), np.int64, len(found))
        if now_us is None:
            ms = (one.timestamp()[1] for one in messages)
            at_us = np.fromiter(ms, np.int64, len(found)) * 1000
        else:
            at_us = np.full(len(found), now_us)
        np.maximum.at(self._last, keys, counts)
        self._pieces.append((keys, counts, at_us))

    @property
    def rows(self) -> int:
        return int(self._last.sum())

    def outputs(self) -> Outputs:
        if not self._pieces:
            return Outputs(*(np.zeros(0, np.int64) for _ in range(3)))
        return Outputs(*map(np.concatenate, zip(*self._pieces, strict=True)))


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Read, check, measure.

    Raises:
        ValueError: what was written is wrong. TimeoutError: not all came.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": task["servers"],
            "group.id": f"reader-{task['topic']}",
            "isolation.level": "read_committed" if task["exactly_once"] else "read_uncommitted",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 100,
        }
    )
    partitions = range(task["partitions"])
    consumer.assign([TopicPartition(task["topic"], number, 0) for number in partitions])
    seen = _Seen(task["keys"])
    try:
        (_live if task["live"] else _to_the_end)(consumer, seen, task)
    finally:
        consumer.close()
    outputs = seen.outputs()
    if not task["live"]:
        report = rows_per_s(outputs, task["warm_s"])
        report["drained"] = report["rows_answered"] == task["rows"]
        if report["rows_answered"] > task["rows"]:
            raise ValueError(f"{report['rows_answered']} rows are counted, of {task['rows']}")
        return report | {"outputs": len(outputs.keys)}
    sent = _sent(Path(task["sent"]))
    report = checked(
        outputs, rows=task["rows"], keys=task["keys"], exactly_once=task["exactly_once"]
    )
    return report | latencies(
        outputs,
        rows=task["rows"],
        keys=task["keys"],
        first=task["probe"],
        start_us=sent["start_us"],
        rate=task["rate"],
        warm_s=task["warm_s"],
    )


def _live(consumer: Any, seen: _Seen, task: dict[str, Any]) -> None:
    until_s, look_s = time.monotonic() + task["timeout_s"], 0.0
    answered = Path(task["answered"])
    while True:
        first = consumer.poll(_LOOK_S)  # as soon as there is one
        found = [] if first is None else [first, *consumer.consume(_BATCH, timeout=0)]
        now_us = int(time.time() * 1e6)
        records = [one for one in found if one.error() is None]
        if records:
            seen.take(records, now_us)
        now_s = time.monotonic()
        if now_s < look_s:
            continue
        look_s = now_s + _LOOK_S
        rows = seen.rows
        if rows >= task["probe"] and not answered.exists():
            answered.touch()
        if rows >= task["rows"]:
            return
        if now_s > until_s:
            raise TimeoutError(f"{rows} of {task['rows']} rows are counted, and no more come")


def _to_the_end(consumer: Any, seen: _Seen, task: dict[str, Any]) -> None:
    ended: set[int] = set()
    until_s = time.monotonic() + task["timeout_s"]
    while len(ended) < task["partitions"]:
        found = consumer.consume(_BATCH, timeout=0.2)
        if records := [one for one in found if one.error() is None]:
            seen.take(records, None)
        ended |= {one.partition() for one in found if one.error() and one.error().code() == _EOF}
        if time.monotonic() > until_s:
            raise TimeoutError("the output topic was not read to its end")


_EOF = -191  # _PARTITION_EOF


def _sent(path: Path) -> dict[str, Any]:
    until_s = time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > until_s:
            raise TimeoutError("the producer did not say when it began")
        time.sleep(0.1)
    time.sleep(0.2)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def main() -> None:
    gc.disable()  # it would stop us while rows come or become due, and there are no cycles
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    dumped(run(task), task["result"])


if __name__ == "__main__":
    main()
