"""The windowed sums of the reference's end-to-end test: 100 keys, 3,000 elements each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend.api.processors import KeyedProcessor
from statebackend.continuous.sources.generated_source import GeneratedSource
from statebackend.continuous.sources.source import Json, Split, SplitReader
from statebackend.schema.types import arrow_schema
from statebackend.system import monotonic_s

__all__ = ["ELEMENTS", "KEYS", "OUTPUT", "WINDOW", "FailingOnce", "Sums", "exact"]

KEYS, ELEMENTS, WINDOW = 100, 3_000, 1_000
SPLITS = 4
FIRST_MS = 1_000_000  # of element 0; a window begins here
OUTPUT = "key BIGINT, start BIGINT, n BIGINT, total BIGINT"
STARTS = range(0, ELEMENTS, WINDOW)
EXACT_TOTAL = {start: sum(range(start, start + WINDOW)) for start in STARTS}


class FailingOnce(GeneratedSource):
    """Element ``i // KEYS`` of key ``i mod KEYS``, a millisecond after the one before.

    The first split to have given a third of its rows waits there until the file ``may-fail`` is in
    a folder, and fails once.
    """

    def __init__(self, folder: Path, rows_per_s: float | None = None) -> None:
        super().__init__(
            "key BIGINT, element BIGINT, at TIMESTAMP",
            rows=KEYS * ELEMENTS,
            splits=SPLITS,
            rows_per_s=rows_per_s,
            clock=monotonic_s,
            event_time="at",
            watermark_delay="10 ms",
        )
        self._folder = str(folder)

    def batch(self, numbers: NDArray[np.int64]) -> pa.RecordBatch:
        elements = numbers // KEYS
        columns = [numbers % KEYS, elements, (FIRST_MS + elements) * 1000]
        schema = arrow_schema(self.schema)
        arrays = [pa.array(c).cast(f.type) for c, f in zip(columns, schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def open(self, split: Split, position: Json | None) -> SplitReader:
        return _Failing(super().open(split, position), self._folder)


class _Failing(SplitReader):
    def __init__(self, reader: SplitReader, folder: str) -> None:
        self._reader, self._folder = reader, folder
        self._failed = os.path.exists(f"{folder}/failed")

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        if not self._failed and self.position["rows"] >= KEYS * ELEMENTS / SPLITS / 3:
            if not os.path.exists(f"{self._folder}/may-fail"):
                return None
            self._failed = True
            if _first(f"{self._folder}/failed"):
                raise ValueError("the source's failure")
        return self._reader.read(max_rows)

    @property
    def position(self) -> Json:
        return self._reader.position

    @property
    def ended(self) -> bool:
        return self._reader.ended


def _first(path: str) -> bool:
    try:
        open(path, "x").close()
    except FileExistsError:
        return False
    return True


class Sums(KeyedProcessor):
    """The sum of each key's elements in each window, when it is over."""

    def open(self, ctx: Any) -> None:
        self._sums = ctx.map_state("sums", "start BIGINT", "n BIGINT, total BIGINT")

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> None:
        added: dict[int, tuple[int, int]] = {}
        for row in rows:
            start = row.element // WINDOW * WINDOW
            n, total = added.get(start, (0, 0))
            added[start] = n + 1, total + row.element
        for start, (n, total) in added.items():
            before = self._sums.get_value((start,)) or (0, 0)
            self._sums.update_value((start,), (before[0] + n, before[1] + total))
            ctx.timers.register(FIRST_MS + start + WINDOW - 1)

    def on_timer(self, key: Any, at_ms: int, ctx: Any) -> Iterator[tuple[int, int, int, int]]:
        start = at_ms + 1 - WINDOW - FIRST_MS
        n, total = self._sums.get_value((start,)) or (0, 0)
        self._sums.remove_key((start,))
        yield key[0], start, n, total


def exact(rows: list[dict[str, Any]]) -> None:
    """Three windows a key, each once, with the exact sum."""
    found = [tuple(row.values()) for row in rows]
    wanted = {(key, start, WINDOW, EXACT_TOTAL[start]) for key in range(KEYS) for start in STARTS}
    wrong = [sorted(rows)[:5] for rows in (wanted - set(found), set(found) - wanted)]
    assert wrong == [[], []]
    assert len(found) == len(wanted), "some come twice"
