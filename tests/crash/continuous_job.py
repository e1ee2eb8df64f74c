"""A small continuous job on a folder: its driver, slots, sources and sink are the real ones.

Its slots are threads of this process. What they give depends on nothing but how far the source was
let, so that what a recording holds does not depend on the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import unquote, urlparse

import pyarrow as pa

from recovery.decide.restart_strategy import FixedDelay
from recovery.local.workspace import Workspace
from snapshot.storage.local_store import LocalStore
from snapshot.storage.object_store import ObjectStore
from statebackend import threads
from statebackend.api.processors import KeyedProcessor
from statebackend.continuous.driver.continuous_query import ContinuousQuery
from statebackend.continuous.driver.query_start import start
from statebackend.continuous.job.flow import Flow, JobSetup
from statebackend.continuous.job.job_options import RunOptions
from statebackend.continuous.job.streams import continuous
from statebackend.continuous.sinks.file_sink import FileSink
from statebackend.continuous.sources.source import Discovery, Json, Source, Split, SplitReader
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.job_savepoints import saved_lineages
from statebackend.runtime.worker import operator_state_io
from statebackend.schema.types import arrow_schema
from statebackend.settings import Settings
from tests.continuous.runtime.world import ThreadCluster
from tests.recovery.driver import new_id

__all__ = [
    "GROUPS",
    "LONG_S",
    "SAVED",
    "STORES",
    "Let",
    "begun",
    "store_of",
    "values_of",
    "visible",
    "wrong_output",
]

SPLITS, ROWS, KEYS, STEP = 3, 12, 4, 2
GROUPS: Final = 8
STORES: Final = "store"  # of jobs and of the savepoint
SAVED: Final = "file:///saved"  # wherever its folder is: what the log says of it is the same
OUTPUT: Final = "key BIGINT, n BIGINT, value BIGINT"
LONG_S: Final = 60.0


class Let:
    """How many rows of each split the source may give; and how many it gave, in this process."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows
        self._given: Counter[int] = Counter()
        self._lock = threading.Condition()

    def gave(self, split: int, position: int) -> None:
        with self._lock:
            self._given[split] = position
            self._lock.notify_all()

    def on(self, rows: int) -> None:
        """Go on to so many, and wait until they were read."""
        self.rows = rows
        with self._lock:
            done = self._lock.wait_for(
                lambda: all(self._given[split] >= rows for split in range(SPLITS)), LONG_S
            )
        assert done, f"{dict(self._given)} of {rows}"


class Numbers(Source):
    """Splits of so many rows; row ``i`` of split ``s`` has the value ``100 s + i``."""

    splits_end = False  # each subtask reads its share of them by turns

    def __init__(self, let: Let) -> None:
        super().__init__("key BIGINT, value BIGINT", bounded=True)
        self._let = let

    def discover(self, state: Json | None) -> Discovery:
        splits = [] if state else [Split(id=f"{i}", data={"n": i}) for i in range(SPLITS)]
        return Discovery(tuple(splits), {"all": True}, done=True)

    def open(self, split: Split, position: Json | None) -> SplitReader:
        given = position["given"] if position else 0
        return _Reader(self._let, split.data["n"], given, arrow_schema(self.schema))


class _Reader(SplitReader):
    def __init__(self, let: Let, number: int, given: int, schema: pa.Schema) -> None:
        self._let, self._number, self._given, self._schema = let, number, given, schema

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        last = min(self._given + STEP, self._let.rows)
        values = [100 * self._number + n for n in range(self._given, last)]
        if not values:
            return None
        self._given = last
        self._let.gave(self._number, last)
        columns = [[value % KEYS for value in values], values]
        return pa.RecordBatch.from_arrays(
            [pa.array(c, f.type) for c, f in zip(columns, self._schema, strict=True)],
            schema=self._schema,
        )

    @property
    def position(self) -> Json:
        return {"given": self._given}

    @property
    def ended(self) -> bool:
        return self._given >= ROWS


class Numbered(KeyedProcessor):
    """Each row, with its number among those of its key: a gap and a repetition both show."""

    def open(self, ctx: Any) -> None:
        self._n = ctx.value_state("n", "n BIGINT")

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> Iterator[tuple[int, int, int]]:
        (n,) = self._n.get() or (0,)
        for row in rows:
            n += 1
            yield key[0], n, row.value
        self._n.update((n,))


# --- the job --------------------------------------------------------------------------------------


class _Saved(LocalStore):
    """A savepoint's folder; it has one name wherever it lies."""

    @property
    def uri(self) -> str:
        return SAVED


class _Job(Job):
    """A job whose copies on a host have one name wherever its store lies."""

    def __init__(self, root: Path, name: str) -> None:
        super().__init__(f"file://{root}/{STORES}", name)
        self.local_name, self._root = name, root

    def open_at(self, uri: str) -> ObjectStore:
        return _Saved(self._root / STORES / unquote(urlparse(uri).path).strip("/"), new_id=new_id)


class _Cluster(ThreadCluster):
    """One for all jobs of this process: what a server's threads wait for outlives it a while."""

    keeps_workers = False
    _made: ClassVar[_Cluster | None] = None

    @classmethod
    def of_process(cls) -> _Cluster:
        cls._made = cls._made or cls()
        return cls._made


def store_of(root: Path, name: str) -> LocalStore:
    """A job's folder, or the savepoint's, as a reader has it."""
    return LocalStore(root / STORES / name, new_id=new_id)


@contextlib.contextmanager
def begun(
    root: Path, name: str, let: Let, *, files: bool, parallelism: int, savepoint: str | None = None
) -> Iterator[ContinuousQuery]:
    """Start it, as a new process does, and kill it at the end, if it has not ended."""
    operator_state_io._of_process = operator_state_io.KeptBlobs()
    job = _Job(root, name)
    if savepoint is not None:
        job.begins = lambda: saved_lineages(savepoint, job)
    given = {
        "inline_limit_bytes": 40,
        "base_every_epochs": 2,
        "base_apart_every_epochs": 2,
        "base_apart_min_bytes": 1,
        "base_whole_limit_bytes": 0 if files else 1 << 20,
        "retain_epochs": 1,
        "clean_every_epochs": 1,
        "clean_min_age_s": 0.0,
        "max_parallelism": GROUPS,
    }
    settings = Settings.resolve(given, lambda key: None)
    flow = Flow(JobSetup(job, settings, str(root / "local"), savepoint))
    keyed = continuous(flow, Numbers(let), name="numbers").key_by("key")
    made = keyed.process(Numbered(), uid="op", output_schema=OUTPUT)
    made.sink(FileSink(root / "out", format="json"), uid="sink")
    options = RunOptions(checkpoint_interval_s=None, restart=FixedDelay(8, 0.0))
    query = start(flow, parallelism, options, _Cluster.of_process())
    try:
        yield query
    finally:
        assert query.stop(LONG_S)
        _end_process(str(root / "local"))


def _end_process(local_dir: str) -> None:
    """What a process that ends lets go of; what it uploads ends sooner or later."""
    for thread in threading.enumerate():
        if thread.name == "statebackend-upload":
            thread.join(LONG_S)
    threads._real.drain()
    known = Workspace._known.pop((os.getpid(), local_dir), None)
    if known is not None and known._lease >= 0:
        os.close(known._lease)


# --- its output -----------------------------------------------------------------------------------


def truth_of(rows: int = ROWS) -> set[int]:
    """The values that come out, once each, when the source gave so many rows of each split."""
    return {100 * split + n for split in range(SPLITS) for n in range(rows)}


def visible(root: Path) -> list[dict[str, int]]:
    """Every row that readers of the sink's folder see; a file that is cut short does not read."""
    files = sorted((root / "out").glob("part-*.json")) if (root / "out").exists() else []
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def values_of(rows: list[dict[str, int]]) -> set[int]:
    """Which of the source's rows they are."""
    return {row["value"] for row in rows}


def wrong_output(rows: list[dict[str, int]], *, whole: bool) -> str:
    """What is wrong with the output: rows twice, or numbered otherwise; whole: and none missing."""
    values = Counter(row["value"] for row in rows)
    numbers = defaultdict(list)
    for row in rows:
        numbers[row["key"]].append(row["n"])
    twice = sorted(value for value, times in values.items() if times > 1)
    missing = sorted(truth_of() - values.keys()) if whole else []
    gaps = [key for key, ns in numbers.items() if sorted(ns) != list(range(1, len(ns) + 1))]
    if twice or missing or gaps:
        return f"twice {twice}, missing {missing}, numbered with gaps: keys {gaps}"
    return ""
