"""The rows of the input topic, from a process of its own: `... bench.kafka.producer TASK.json`.

A row is ``{"k": 123}`` with ``123`` as the record's key. With a rate, the first ``probe`` rows are
sent at once; the others become due when those have been answered (the reader leaves a file), one
after the other, and count as late as they come after that, whether this process was in time or not.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka import Producer

from bench.continuousjob import dumped, keys_of

__all__ = ["run"]

_CHUNK_ROWS = 20_000
_QUEUED_ROWS = 400_000
_NAP_S = 0.001


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Send all rows.

    Raises:
        RuntimeError: the broker did not take some.
        TimeoutError: nothing was answered.
    """
    sender = _Sender(task)
    rate = task["rate"]
    if not rate:
        start_s = time.time()
        sender.send(task["rows"])
        sender.flush()
        return {"rows_per_s": round(task["rows"] / (time.time() - start_s), 1)}
    sender.send(task["probe"])
    sender.flush()
    _wait_for(Path(task["answered"]), task["timeout_s"])
    start_s = time.time()
    late_s = 0.0
    while sender.sent < task["rows"]:
        now_s = time.time()
        due = min(task["rows"], task["probe"] + int((now_s - start_s) * rate) + 1)
        if due > sender.sent:
            first_due_s = start_s + (sender.sent - task["probe"]) / rate
            sender.send(due)
            late_s = max(late_s, time.time() - first_due_s)
        else:
            time.sleep(_NAP_S)
    sender.flush()
    return {"start_us": int(start_s * 1e6), "sent_late_ms_max": round(late_s * 1000, 2)}


def _wait_for(path: Path, timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > until_s:
            raise TimeoutError(f"the first rows were not answered in {timeout_s:g} s")
        time.sleep(0.05)


class _Sender:
    def __init__(self, task: dict[str, Any]) -> None:
        self._topic, self.sent, self._failed = task["topic"], 0, 0
        names = [str(key).encode() for key in range(task["keys"])]
        self._messages = [(name, b'{"k": ' + name + b"}") for name in names]
        self._keys = task["keys"]
        self._client = Producer(
            {
                "bootstrap.servers": task["servers"],
                "partitioner": "murmur2_random",
                "linger.ms": 1 if task["rate"] else 20,
                "acks": "all",
                "enable.idempotence": True,
                "queue.buffering.max.messages": 2 * _QUEUED_ROWS,
                "delivery.report.only.error": True,
            }
        )

    def send(self, until: int) -> None:
        """The rows up to a number, without it."""
        while self.sent < until:
            numbers = np.arange(self.sent, min(until, self.sent + _CHUNK_ROWS), dtype=np.int64)
            made = [self._messages[key] for key in keys_of(numbers, self._keys).tolist()]
            messages = [{"key": key, "value": value} for key, value in made]
            taken = self._client.produce_batch(self._topic, messages, on_delivery=self._delivered)
            if taken != len(messages):
                raise RuntimeError(f"{len(messages) - taken} rows found no room")
            self.sent = int(numbers[-1]) + 1
            self._client.poll(0)
            while len(self._client) > _QUEUED_ROWS:
                self._client.poll(0.01)

    def _delivered(self, error: Any, message: Any) -> None:
        self._failed += error is not None

    def flush(self) -> None:
        """Wait until the broker has them."""
        if self._client.flush(120) or self._failed:
            raise RuntimeError(f"the broker did not take all rows; {self._failed} failed")


def main() -> None:
    gc.disable()  # it would stop us while rows come or become due, and there are no cycles
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    dumped(run(task), task["result"])


if __name__ == "__main__":
    main()
