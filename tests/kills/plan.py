"""Plans which job is killed, how often, how and by which seed. Pure: a seed replays it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from random import Random
from typing import Literal

from recovery.drill.faults.drill_fault import DrillFault
from recovery.drill.run.strike_schedule import Strike
from tests.kills.strikes import DRIVER, EXECUTOR, JVM, RESCALED, WORKER

KILLS_EACH = 5


@dataclass(frozen=True)
class Round:
    """One job, killed over and over. ``job``: a name of :data:`tests.kills.jobs.JOBS`."""

    job: str
    seed: int
    cluster: str
    commit: Literal["sync", "async"]
    parallelism: int
    faults: tuple[DrillFault, ...]

    @property
    def strikes(self) -> list[Strike]:
        """Each as soon as the job has recovered from the one before."""
        return [Strike(fault=fault, after_epoch=0) for fault in self.faults]

    @property
    def shown(self) -> str:
        """One line."""
        return (
            f"{self.job}, {self.commit}, {self.parallelism} subtasks on {self.cluster}, "
            f"seed {self.seed}: {', '.join(fault.name for fault in self.faults)}"
        )


def rounds(jobs: list[str], *, kills: int, seed: int) -> Iterator[Round]:
    """So many kills over all jobs, one job after the other, as evenly as they go."""
    rng = Random(f"kills:{seed}")
    left = kills
    for number, job in enumerate(cycle(jobs)):
        if left <= 0:
            return
        count = min(left, KILLS_EACH)
        left -= count
        lap = number // len(jobs)
        yield _round(job, lap + number, count, seed + number, rng)


def _round(job: str, turn: int, count: int, seed: int, rng: Random) -> Round:
    continuous = job.startswith("continuous")
    # Mostly drivers that bring all of their processes along: the quickest to start again.
    on_executors = turn % 4 == 3
    parallelism = (1, 3)[turn % 2]
    if continuous:
        cluster = "local-cluster[3,1,1024]" if on_executors else "local[3]"
    else:
        cluster = "local-cluster[2,1,1024]" if on_executors else "local[2]"
    if continuous and on_executors:
        parallelism = min(parallelism, 2)  # a driver takes two cores of a cluster
    pool = [WORKER, EXECUTOR, EXECUTOR, DRIVER] if on_executors else [WORKER, DRIVER, DRIVER, JVM]
    faults = [rng.choice(pool) for _ in range(count)]
    if count > 1:
        faults[rng.randrange(1, count)] = RESCALED
    return Round(
        job=job,
        seed=seed,
        cluster=cluster,
        commit="async" if not continuous and turn % 3 == 1 else "sync",
        parallelism=parallelism,
        faults=tuple(faults),
    )
