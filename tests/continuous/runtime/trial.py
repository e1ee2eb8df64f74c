"""A small job that is failed at random moments, and its output counted: what planted bugs meet.

Everything fails that can: slots, the driver before and after it writes a record or commits output,
the store under a snapshot; local copies vanish between runs. How often is bounded, so that a job
that is right comes to its end.
"""

from __future__ import annotations

import random
import shutil
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recovery.decide.restart_strategy import FixedDelay
from statebackend import system
from statebackend.api.processors import KeyedProcessor
from statebackend.continuous.driver.run_loop import JobRun
from statebackend.continuous.driver.run_state import RunState
from statebackend.continuous.driver.slot_stage import Stage
from statebackend.continuous.sinks.file_sink import FileSink
from statebackend.continuous.sources.source import Discovery, Json, Source, Split, SplitReader
from statebackend.continuous.worker.slot import Run
from statebackend.errors import StateBackendError, StoreUnreachableError
from statebackend.rpc.session_endpoint import Credentials
from statebackend.runtime.driver.session import RunSession
from statebackend.runtime.worker import participant
from statebackend.schema.types import arrow_schema
from tests.continuous.runtime.world import ThreadCluster, World
from tests.support.faults import Fault

__all__ = ["STRIKES", "Result", "Shown", "Trial", "TrialConfig", "lived"]

Shown = Literal["", "rows", "error", "stuck"]

SPLITS, ROWS, KEYS = 48, 20, 7
STEP, STEP_S = 5, 0.012
PER_CHECKPOINT = 2  # splits: rows last as long as checkpoints do, on however slow a machine
LIMIT_S = 60.0
SLOTS, DRIVER, STORE = "slots", "driver", "store"
BUDGET = {SLOTS: 7, DRIVER: 4, STORE: 8}  # of requests, by who makes them
STRIKES = (Fault.SLOT_FAILED, Fault.REQUEST_LOST, Fault.ANSWER_LOST, Fault.LOCAL_FILE_GONE)


class Slices(Source):
    """More splits than subtasks, each of so many rows, which come a few at a time."""

    def __init__(self, trial: Trial) -> None:
        super().__init__("key BIGINT, value BIGINT", bounded=True)
        self._trial = trial

    def discover(self, state: Json | None) -> Discovery:
        splits = [] if state else [Split(id=f"{i:03}", data={"n": i}) for i in range(SPLITS)]
        return Discovery(tuple(splits), {"all": True}, done=True)

    def open(self, split: Split, position: Json | None) -> SplitReader:
        given = position["given"] if position else 0
        return _Slice(self._trial, split.data["n"], given, arrow_schema(self.schema))


class _Slice(SplitReader):
    def __init__(self, trial: Trial, number: int, given: int, schema: pa.Schema) -> None:
        self._trial, self._number, self._given, self._schema = trial, number, given, schema
        self._next_s = system.monotonic_s()

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        now_s = system.monotonic_s()
        if now_s < self._next_s or self._number > PER_CHECKPOINT * (self._trial.settled + 1):
            return None
        self._next_s = now_s + STEP_S
        if self._number % 3 == 0:
            system.sleep_s(STEP_S)  # whoever reads this is late with its barriers
        first = self._number * ROWS + self._given
        values = range(first, first + min(STEP, ROWS - self._given))
        self._given += len(values)
        columns = [[value % KEYS for value in values], list(values)]
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


class _LossyCluster(ThreadCluster):
    """Between two runs local copies may vanish, as on another host."""

    keeps_workers = False

    def __init__(self, trial: Trial, local: Path) -> None:
        super().__init__()
        self._trial, self._local = trial, local

    def stage(self, run: Run, credentials: Credentials) -> Stage:
        if self._trial.drawn.random() < 0.5:
            shutil.rmtree(self._local, ignore_errors=True)
            self._trial.counts[Fault.LOCAL_FILE_GONE] += 1
        self._trial.runs += 1
        return super().stage(run, credentials)


class Trial:
    """One job, failed as a seed says, as far as threads go by a seed.

    Attributes:
        runs: how often it was started. made: faults so far, by where. counts: by what they are.
        settled: checkpoints that are over, complete or not.
        most: so many were under way at once.
    """

    def __init__(
        self, folder: Path, seed: int, patch: pytest.MonkeyPatch, *, concurrent: int = 1
    ) -> None:
        self.drawn = random.Random(seed)
        self.runs = self.settled = self.most = 0
        self._concurrent = concurrent
        self.made = dict.fromkeys(BUDGET, 0)
        self.counts: Counter[str] = Counter()
        self.out = folder / "out"
        self._lock = threading.Lock()
        self._world = World(folder)
        self._world.cluster.close()
        self._world.cluster = _LossyCluster(self, folder / "local")
        self._world.renew(inline_limit_bytes=16)
        self._fail_at_random(patch)
        self._count(patch)

    def run(self) -> tuple[Shown, str]:
        """To the end, or to where it is seen that it will not come; what is wrong, and how."""
        stream = self._world.source(Slices(self)).key_by("key")
        schema = "key BIGINT, n BIGINT, value BIGINT"
        stream.process(Numbered(), uid="numbered", output_schema=schema).sink(FileSink(self.out))
        query = self._world.start(
            2,
            restart=FixedDelay(BUDGET[SLOTS] + BUDGET[DRIVER] + 6, 0.0),
            checkpoint_interval_s=0.03 / self._concurrent,
            max_concurrent=self._concurrent,
            tolerable_failures=1000,
        )
        until_s = system.monotonic_s() + LIMIT_S
        run, fail_at = 0, 0
        try:
            while not query.await_termination(0.005):
                if system.monotonic_s() > until_s:
                    return "stuck", f"after {self.runs} runs and {self.settled} checkpoints"
                self.settled = len(query.checkpoints())
                if run != self.runs or not query.is_running:
                    run, more = self.runs, self.drawn.randint(1, 4 * self._concurrent)
                    fail_at = self.settled + more
                elif self.settled >= fail_at and self._may_fail(SLOTS, Fault.SLOT_FAILED):
                    system.sleep_s(self.drawn.uniform(0.0, 0.03))
                    slot = self.drawn.choice(self._world.cluster.slots[-2:])
                    slot._link.broken("drawn", 0, RuntimeError("drawn"))
        except StateBackendError as error:
            return "error", str(error)
        finally:
            self._world.close()
        wrong = self._wrong()
        return ("rows", wrong) if wrong else ("", "")

    def _count(self, patch: pytest.MonkeyPatch) -> None:
        """How many checkpoints are under way; where there are to be several, the store is slow."""
        really, durable = RunState.tick, participant.durable_slice

        def tick(machine: RunState, now_s: float, wall_ms: int) -> Any:
            outs = really(machine, now_s, wall_ms)
            self.most = max(self.most, len(machine._attempts))
            return outs

        def slowly(*given: Any) -> Any:
            system.sleep_s(0.02)
            return durable(*given)

        patch.setattr(RunState, "tick", tick)
        if self._concurrent > 1:
            patch.setattr(participant, "durable_slice", slowly)

    # --- what fails ------------------------------------------------------------------------------

    def _may_fail(self, kind: str, fault: Fault, chance: float = 1.0) -> bool:
        with self._lock:
            if self.made[kind] >= BUDGET[kind] or self.drawn.random() >= chance:
                return False
            self.made[kind] += 1
            self.counts[fault] += 1
            return True

    def _fail_at_random(self, patch: pytest.MonkeyPatch) -> None:
        for holder, name, kind, chance in (
            (RunSession, "ack", DRIVER, 0.015),
            (JobRun, "_write", DRIVER, 0.04),
            (JobRun, "_publish", DRIVER, 0.04),
            (participant, "durable_slice", STORE, 0.15),
        ):
            patch.setattr(holder, name, self._failing(getattr(holder, name), kind, chance))

    def _failing(self, really: Callable[..., Any], kind: str, chance: float) -> Callable[..., Any]:
        """A request that is lost, or whose answer is."""

        def call(*args: Any) -> Any:
            if self._may_fail(kind, Fault.REQUEST_LOST, chance):
                raise StoreUnreachableError("drawn, before")
            found = really(*args)
            if self._may_fail(kind, Fault.ANSWER_LOST, chance):
                raise StoreUnreachableError("drawn, after")
            return found

        return call

    # --- what came out ---------------------------------------------------------------------------

    def _wrong(self) -> str:
        """Each key's rows must be numbered without a gap, and each value be there once."""
        numbers: dict[int, list[int]] = defaultdict(list)
        values: Counter[int] = Counter()
        for file in self.out.glob("part-*.parquet"):
            for row in pq.read_table(file).to_pylist():
                numbers[row["key"]].append(row["n"])
                values[row["value"]] += 1
        missing = [value for value in range(SPLITS * ROWS) if value not in values]
        twice = [value for value, times in values.items() if times > 1]
        gaps = [key for key, ns in numbers.items() if sorted(ns) != list(range(1, len(ns) + 1))]
        if not (missing or twice or gaps):
            return ""
        return f"missing {missing[:5]}, more than once {twice[:5]}, keys with gaps {gaps}"


@dataclass
class TrialConfig:
    """What a trial is like. ``concurrent``: checkpoints under way at once, at most."""

    concurrent: int = 1


@dataclass
class Result:
    """What became of one trial, and the faults that struck it."""

    counts: Counter[str]
    violations: list[tuple[str, str]] = field(default_factory=list)


def lived(
    folder: Path,
    seed: int,
    config: TrialConfig,
    planted: Callable[[], AbstractContextManager[None]],
) -> Result:
    """One trial to its end, with something planted in the job while it runs."""
    with pytest.MonkeyPatch.context() as patch:
        trial = Trial(folder, seed, patch, concurrent=config.concurrent)
        with planted():  # over the faults: what it puts in a function's place may still fail
            shown, what = trial.run()
    return Result(trial.counts, [(shown, what)] if shown else [])
