"""Entries for Redis streams, added while a job reads them, and what it must count."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

__all__ = ["ENTRIES", "NAMES", "STREAMS", "Feeder", "counted", "rows_of", "wanted"]

STREAMS, ENTRIES, KEYS = 3, 1500, 20
PAUSE_S: Final = 0.02
NAMES = [f"s{number}" for number in range(STREAMS)]


def entry(stream: int, number: int) -> dict[str, int]:
    return {"key": number * 7 % KEYS, "value": number * STREAMS + stream}


class Feeder(threading.Thread):
    """Adds entries to all streams by turns; what the server may have is tried again, by its id."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.error: Exception | None = None
        self.added = 0

    def run(self) -> None:
        import redis

        client = redis.Redis.from_url(self._url, socket_timeout=5)
        try:
            for number in range(ENTRIES):
                for stream in range(STREAMS):
                    self._add(redis, client, stream, number)
                    self.added += 1
                if number % 5 == 0:
                    time.sleep(PAUSE_S)
        except Exception as error:
            self.error = error

    def _add(self, redis: Any, client: Any, stream: int, number: int) -> None:
        while True:
            try:
                client.xadd(f"s{stream}", entry(stream, number), id=f"{number + 1}-0")
                return
            except redis.BusyLoadingError:
                time.sleep(0.05)
            except redis.ResponseError as error:
                if "equal or smaller" not in str(error):
                    raise
                return  # it had taken the first try
            except (redis.ConnectionError, redis.TimeoutError):
                time.sleep(0.05)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("part-*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def counted(folder: Path) -> int:
    """How many rows the newest counts are of."""
    newest: dict[int, int] = {}
    for row in rows_of(folder):
        newest[row["key"]] = max(newest.get(row["key"], 0), row["n"])
    return sum(newest.values())


def wanted() -> dict[int, tuple[int, int]]:
    counts: Counter[int] = Counter()
    totals: Counter[int] = Counter()
    for stream in range(STREAMS):
        for number in range(ENTRIES):
            row = entry(stream, number)
            counts[row["key"]] += 1
            totals[row["key"]] += row["value"]
    return {key: (counts[key], totals[key]) for key in counts}
