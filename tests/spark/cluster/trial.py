"""A job on a real cluster of processes, its kills, and the check of its results."""

from __future__ import annotations

import datetime
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from recovery.drill.cluster import polling
from recovery.drill.cluster.live_processes import LiveProcesses
from recovery.drill.cluster.local_cluster import Cluster
from recovery.drill.jobs.committed_epochs import committed_epochs

LIMIT_S = 600.0
"""For whatever takes tens of seconds on an idle machine."""
FILES = 10
KEYS = 40
ROWS = 300
DELAY_MS = 4000
WINDOW_MS = 10_000
_JOB = Path(__file__).with_name("job.py")


def until(condition: Callable[[], Any], what: str, timeout_s: float = LIMIT_S) -> Any:
    """Poll until ``condition`` gives something true; the test fails where it does not."""
    return polling.until(condition, what, timeout_s)


def timed_truth(
    initial: list[dict[str, Any]], files: list[list[dict[str, Any]]], epochs: list[list[int]]
) -> list[tuple[Any, ...]]:
    """What the job with time gives out, made in plain Python from its input alone.

    Args:
        initial: rows of the initial state. files: rows of each file.
        epochs: the numbers of the files that each epoch took in.
    """
    totals: Counter[int] = Counter()
    timers: dict[tuple[int, int], int] = {}  # (time, key): rows in the window
    for row in initial:
        totals[row["k"]] += row["v"]
        timers[row["at_ms"], row["k"]] = 0
    out = []
    watermark_ms, late_ms, largest_ms = 0, 0, 0
    for epoch, numbers in enumerate(epochs):
        late_ms, watermark_ms = watermark_ms, max(watermark_ms, largest_ms - DELAY_MS)
        rows: dict[int, list[dict[str, Any]]] = {}
        for row in (row for number in numbers for row in files[number]):
            largest_ms = max(largest_ms, row["at_ms"])
            if row["at_ms"] > late_ms:
                rows.setdefault(row["k"], []).append(row)
        for k, own in rows.items():
            totals[k] += sum(row["v"] for row in own)
            for row in own:
                due = row["at_ms"] // WINDOW_MS * WINDOW_MS + WINDOW_MS, k
                timers[due] = timers.get(due, 0) + 1
            taken = tuple(sorted({row["file"] for row in own}))
            out.append((epoch, "rows", k, 0, len(own), totals[k], taken))
        for at_ms, k in sorted(due for due in timers if due[0] <= watermark_ms):
            out.append((epoch, "timer", k, at_ms, timers.pop((at_ms, k)), totals[k], ()))
    return out


@dataclass
class Trial:
    """One job in a directory of its own: its input, its drivers, and the truth."""

    root: Path
    cluster: Cluster
    drivers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def write_input(self, *, files: int = FILES, flag_in_file: int = -1) -> None:
        """Files of rows, in order of their modification times."""
        rng = random.Random(7)
        folder = self.root / "in"
        folder.mkdir(parents=True)
        for number in range(files):
            rows = [
                {
                    "k": rng.randrange(KEYS),
                    "v": rng.randrange(1000),
                    "file": number,
                    "flag": number == flag_in_file and i == 0,
                }
                for i in range(ROWS)
            ]
            path = folder / f"{number:03}.json"
            path.write_text("\n".join(map(json.dumps, rows)))
            os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))

    def write_timed_input(self, *, flag_in_file: int = -1) -> dict[str, Any]:
        """Rows with event times, some of them late, and an initial state.

        Returns:
            what to tell the driver.
        """
        rng = random.Random(11)
        base_ms = 1_767_225_600_000
        folder = self.root / "in"
        folder.mkdir(parents=True)
        for number in range(FILES):
            rows = []
            for i in range(ROWS):
                late = 40 if i % 9 == 0 else 0
                at_ms = base_ms + 1000 * (60 + number * 7 - late + rng.randrange(9))
                moment = datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC)
                row = {"k": rng.randrange(KEYS), "v": rng.randrange(1000), "file": number}
                row |= {"at": moment.strftime("%Y-%m-%d %H:%M:%S"), "at_ms": at_ms}
                rows.append(row | {"flag": number == flag_in_file and i == 1})
            path = folder / f"{number:03}.json"
            path.write_text("\n".join(map(json.dumps, rows)))
            os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
        # Every other key of the stream, and keys that it never has.
        keys = [*range(0, KEYS, 2), *range(KEYS, KEYS + 10)]
        initial = [
            {"k": k, "v": 10_000 * k, "at_ms": base_ms + 60_001 + 2290 * i}
            for i, k in enumerate(keys)
        ]
        path = self.root / "initial.json"
        path.write_text("\n".join(map(json.dumps, initial)))
        return {"windows": {"delay_ms": DELAY_MS, "initial": str(path)}}

    @property
    def processes(self) -> LiveProcesses:
        """The living ones of this test."""
        return self.cluster.processes

    def start(self, name: str, *, program: Path = _JOB, **told: Any) -> subprocess.Popen[bytes]:
        """Start a driver."""
        told = {"name": name, "root": str(self.root), "master": self.cluster.master, **told}
        with (self.root / f"driver-{name}.log").open("wb") as log:
            driver = subprocess.Popen(
                [sys.executable, str(program), json.dumps(told)],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.cluster.driver_environment(),
                cwd=self.root,
                start_new_session=True,
            )
        self.drivers.append(driver)
        return driver

    def committed(self) -> int:
        """The last batch that Spark committed."""
        return max(committed_epochs(self.root / "checkpoint"), default=-1)

    def wait_for_batch(self, batch: int) -> None:
        """Wait until Spark has committed ``batch``."""

        def reached() -> bool:
            self._still_running()
            return self.committed() >= batch

        until(reached, f"batch {batch} of {self.root}")

    def _still_running(self) -> None:
        code = self.drivers[-1].poll()
        if code not in (None, 0):
            raise AssertionError(f"the driver ended with {code}:\n{self.log_tail()}")

    def log_tail(self) -> str:
        """The end of the newest driver's log."""
        log = max(self.root.glob("driver-*.log"), key=lambda p: p.stat().st_mtime)
        return log.read_text(errors="replace")[-6000:]

    def finish(self, driver: subprocess.Popen[bytes], name: str, *, ok: bool = True) -> dict:
        """Wait for a driver's own end; what it reports."""
        code = driver.wait(timeout=LIMIT_S)
        assert (code == 0) == ok, f"the driver ended with {code}:\n{self.log_tail()}"
        return json.loads((self.root / f"result-{name}.json").read_text())

    def check(self, *, recut: bool = False) -> None:
        """Compare the sink with a count made from the input files alone.

        Args:
            recut: the query went back by a batch. Spark's file source remembers what it had planned
                after it, and puts two files into one of the later batches.
        """
        n: Counter[int] = Counter()
        total: Counter[int] = Counter()
        files: dict[int, set[int]] = {}
        expected = []
        inputs = sorted((self.root / "in").iterdir())
        batches = len(inputs)
        for path in inputs:
            touched = set()
            for line in path.read_text().splitlines():
                row = json.loads(line)
                n[row["k"]] += 1
                total[row["k"]] += row["v"]
                files.setdefault(row["k"], set()).add(row["file"])
                touched.add(row["k"])
            expected += [(k, n[k], total[k], len(files[k])) for k in touched]
        found = [(row["k"], row["n"], row["total"], row["files"]) for row in self._output()]
        if recut:
            # A key that was in both files of such a batch has one row instead of two.
            assert set(found) <= set(expected)
            assert {k: max(r for r in found if r[0] == k) for k in n} == {
                k: (k, n[k], total[k], len(files[k])) for k in n
            }
            assert batches - 2 <= self.committed() <= batches - 1
            return
        assert sorted(found) == sorted(expected)
        assert self.committed() == batches - 1

    def timed_input(self) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
        """The initial state, and the rows of each file."""
        paths = [self.root / "initial.json", *sorted((self.root / "in").iterdir())]
        initial, *files = [list(map(json.loads, p.read_text().splitlines())) for p in paths]
        return initial, files

    def last_timer_ms(self) -> int:
        """The last timer that fires, in the batch without data after all files."""
        epochs = [[number] for number in range(FILES)]
        return max(row[3] for row in timed_truth(*self.timed_input(), [*epochs, []]))

    def check_timed(self, *, recut: bool = False) -> None:
        """Compare the sink of the job with time with what its input must give.

        Args:
            recut: as in :meth:`check`: which files an epoch took in is read from the output then.
        """
        found = [
            (*(row[n] for n in ("epoch", "kind", "k", "at_ms", "n", "total")), tuple(row["files"]))
            for row in self._output()
        ]
        epochs = [[number] for number in range(FILES)]
        if recut:
            taken: dict[int, set[int]] = {}
            for row in found:
                taken.setdefault(row[0], set()).update(row[-1])
            epochs = [sorted(taken.get(n, ())) for n in range(self.committed())]
            assert sorted(n for numbers in epochs for n in numbers) == list(range(FILES))
        # At the end comes one batch without data, by the watermark of the last file.
        truth = timed_truth(*self.timed_input(), [*epochs, []])
        assert sorted(found) == sorted(truth)
        assert self.committed() == len(epochs)

    def _output(self) -> list[dict[str, Any]]:
        batches = sorted((self.root / "out").glob("*.json"))
        if batches:
            return [row for path in batches for row in json.loads(path.read_text())]
        return pq.ParquetDataset(self._sink_files()).read().to_pylist()

    def _sink_files(self) -> list[str]:
        # What the sink's own log lists: files of failed attempts are not part of the output.
        names = set()
        for path in (self.root / "out" / "_spark_metadata").iterdir():
            if path.name.startswith("."):
                continue
            for line in path.read_text().splitlines()[1:]:
                entry = json.loads(line)
                if entry["action"] == "add":
                    names.add(entry["path"].removeprefix("file://").removeprefix("file:"))
        return sorted(names)

    def end(self) -> None:
        """End the drivers; the cluster ends what else there is, frozen processes too."""
        for driver in self.drivers:
            if driver.poll() is None:
                driver.kill()
            driver.wait(timeout=30)
