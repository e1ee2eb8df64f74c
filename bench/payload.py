"""Large state, quickly filled and checked on every read: values that do not compress."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import BinaryType, LongType, Row, StructField, StructType

from bench.inproc import Harness, spark_batches
from bench.s3 import Place

__all__ = ["VALUE_BYTES", "Large", "Payload", "wait_for_uploads"]

VALUE_BYTES = 4096
_POOL_BYTES = 64 << 20
STATE = StructType([StructField("n", LongType()), StructField("data", BinaryType())])
UPLOAD_LIMIT_S = 300.0


class Payload(StatefulProcessor):
    """Replaces a key's value by another piece of noise; knows what it wrote, and checks it.

    Attributes:
        written: what each key must hold, by key: an offset into the noise.
    """

    def __init__(self) -> None:
        self._noise = np.random.default_rng(5).bytes(_POOL_BYTES)
        self.written: dict[int, int] = {}
        self._turn = 0

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._value = handle.getValueState("count", STATE)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        number = sum(1 for _ in rows)
        old, before = self._value.get(), self.written.get(key[0])
        if before is not None and (old is None or old[1] != self._piece(before)):
            raise AssertionError(f"key {key[0]} does not hold what was written")
        self._turn += 1
        offset = (key[0] * 8191 + self._turn * 524_287) % (_POOL_BYTES - VALUE_BYTES)
        self._value.update((number, self._piece(offset)))
        self.written[key[0]] = offset
        yield Row(k=key[0], n=number)

    def _piece(self, offset: int) -> bytes:
        return self._noise[offset : offset + VALUE_BYTES]

    def close(self) -> None:
        pass


class Large:
    """One subtask with large state on S3, epoch by epoch."""

    def __init__(
        self,
        folder: Path,
        *,
        server: Place,
        name: str,
        keys: int,
        overrides: dict[str, Any],
        processor: Payload | None = None,
    ) -> None:
        self.folder, self.keys = folder, keys
        self.processor = processor or Payload()
        folder.mkdir(parents=True, exist_ok=True)
        self.harness = Harness(
            folder,
            keys=keys,
            processor=self.processor,
            state=STATE,
            overrides=overrides,
            uri=server.uri(name),
            options=server.options(),
        )
        self._random = np.random.default_rng(11)

    def fill(self, epochs: int = 8) -> None:
        """Every key once, spread over so many epochs."""
        for part in np.array_split(np.arange(self.keys, dtype=np.int64), epochs):
            self.run(part)

    def change(self, keys: int) -> float:
        """One epoch that changes so many keys; how long it took, in seconds."""
        return self.run(self._random.choice(self.keys, keys, replace=False).astype(np.int64))

    def run(self, keys: np.ndarray) -> float:
        batches = spark_batches(keys, self.harness.epoch)
        started_s = time.perf_counter()
        self.harness.run(batches)
        return time.perf_counter() - started_s


def wait_for_uploads() -> None:
    """Until no base is being uploaded by this process."""
    for thread in threading.enumerate():
        if thread.name == "statebackend-upload":
            thread.join(UPLOAD_LIMIT_S)
