"""The work directory: what lies where."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WorkDir:
    """Paths under one root."""

    root: Path

    @property
    def feed(self) -> Path:
        """Parquet files that are the stream."""
        return self.root / "feed"

    @property
    def store(self) -> Path:
        """Durable copies; would be a bucket."""
        return self.root / "store"

    @property
    def local(self) -> Path:
        """Local copies; would be a disk of each executor's host."""
        return self.root / "local"

    @property
    def checkpoint(self) -> Path:
        """Spark's checkpoint location: offsets and commits."""
        return self.root / "checkpoint"

    @property
    def sink(self) -> Path:
        """What the query writes."""
        return self.root / "sink"

    @property
    def result(self) -> Path:
        """The sink's rows, as Spark reads them."""
        return self.root / "result.parquet"

    @property
    def scratch(self) -> Path:
        """Everybody's temporary files, so that a killed process leaves none elsewhere."""
        return self.root / "scratch"

    @property
    def log(self) -> Path:
        """What the drivers print."""
        return self.root / "driver.log"

    def report(self, run: int) -> Path:
        """How a run's subtasks got their state back (JSON)."""
        return self.root / f"restores-{run}.json"

    def epochs_planned(self) -> int:
        """How many epochs Spark has begun."""
        return _entries(self.checkpoint / "offsets")

    def epochs_done(self) -> int:
        """How many epochs Spark has committed."""
        return _entries(self.checkpoint / "commits")

    def files_by_epoch(self) -> list[int]:
        """How many files of the feed Spark had taken by the end of each epoch.

        Mostly one each. A driver that is killed after it noted the next file, and before it planned
        an epoch for it, makes Spark put two into one epoch.
        """
        plans = [self.checkpoint / "offsets" / str(epoch) for epoch in range(self.epochs_done())]
        return [json.loads(plan.read_text().splitlines()[-1])["logOffset"] + 1 for plan in plans]


def _entries(folder: Path) -> int:
    """How far one of Spark's logs goes."""
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return max((int(name) + 1 for name in names if name.isdigit()), default=0)


def size_bytes(folder: Path) -> int:
    """All files under a folder, which may be changing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total
