"""A sink that collects rows in the driver's memory, exactly once: for tests and small results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa

from statebackend.continuous.sinks.committables import decode_committable
from statebackend.continuous.sinks.sink import Committer, Sink, SinkContext, SinkWriter

__all__ = ["CollectSink"]

FORMAT_VERSION: Final = 1


class _Committable(msgspec.Struct, frozen=True, kw_only=True):
    """Rows, as an Arrow stream; `id` is no other's."""

    v: int
    id: str
    rows: bytes


class CollectSink(Sink):
    """Collects rows in this object, in the driver's memory, exactly once: for tests.

    The rows travel with the checkpoints, so they must be few.
    """

    def __init__(self) -> None:
        self._found: dict[str, list[pa.RecordBatch]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_found": {}}  # the copies in the subtasks have none

    def batches(self) -> list[pa.RecordBatch]:
        """What was committed so far, in the order of the commits."""
        return [batch for batches in self._found.values() for batch in batches]

    def rows(self) -> list[dict[str, Any]]:
        """The same as Python values."""
        return [row for batch in self.batches() for row in batch.to_pylist()]

    def open(self, context: SinkContext) -> SinkWriter:
        """A writer that keeps rows until they are prepared."""
        return _Writer(f"{context.uid}/{context.run}/{context.subtask}")

    def committer(self, job: str, uid: str) -> Committer:
        """Adds to this object."""
        return _Committer(self._found)


class _Writer(SinkWriter):
    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._batches: list[pa.RecordBatch] = []

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self._batches.append(batch)

    def prepare(self, checkpoint: int) -> list[bytes]:
        if not self._batches:
            return []
        buffer = pa.BufferOutputStream()
        with pa.ipc.new_stream(buffer, self._batches[0].schema) as stream:
            for batch in self._batches:
                stream.write_batch(batch)
        self._batches = []
        committable = _Committable(
            v=FORMAT_VERSION,
            id=f"{self._prefix}/{checkpoint}",
            rows=buffer.getvalue().to_pybytes(),
        )
        return [msgspec.msgpack.encode(committable)]

    def abort(self) -> None:
        self._batches = []


class _Committer(Committer):
    def __init__(self, found: dict[str, list[pa.RecordBatch]]) -> None:
        self._found = found

    def commit(self, committables: Sequence[bytes]) -> None:
        for data in committables:
            one = decode_committable(data, _Committable, FORMAT_VERSION)
            if one.id not in self._found:
                self._found[one.id] = list(pa.ipc.open_stream(one.rows))
