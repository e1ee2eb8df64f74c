"""The kinds of jobs that drills run, and how they differ, as a drill sees it.

Whatever the kind, a driver marks an epoch that is committed with a file of its number in the
checkpoint's `commits/`, and all of its output lies in one folder of Parquet files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from recovery.drill.jobs import batch_sink as sink
from recovery.drill.jobs import continuous_output as files
from statebackend.runtime.driver.worker_memory import local_slots

__all__ = ["BATCHES", "CONTINUOUS", "KINDS", "Kind", "KindName", "slots_of"]

KindName = Literal["batches", "continuous"]

_SUBTASKS: Final = 4
_MOST: Final = 9
_CORES_MAX: Final = 2  # what a driver is told to take of a cluster of executors


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of job.

    Attributes:
        name: as `DrillJob.kind` has it.
        driver: `module:function` that runs such a job in a driver's process.
        rows: the rows that count, the oldest of each key first: of a folder of output, up to an
            epoch; each with its epoch, if it is known.
        in_slots: whether each subtask has a task slot of the cluster, for as long as the job runs.
        commits: what may be given as `commit=`.
    """

    name: KindName
    driver: str
    rows: Callable[[Path, int], Iterator[tuple[int, dict[str, Any]]]]
    in_slots: bool
    commits: frozenset[str]

    def subtasks(self, cluster: str) -> int:
        """As many as there are if nobody says how many."""
        return min(_SUBTASKS, self.subtasks_max(cluster))

    def subtasks_max(self, cluster: str) -> int:
        """The most that a fault may ask for."""
        return min(_MOST, slots_of(cluster)) if self.in_slots else _MOST


def slots_of(cluster: str) -> int:
    """How many tasks can run at once on the cluster of a drill, by its name."""
    local = local_slots(cluster)
    if local is not None:
        return local
    if several := re.fullmatch(r"local-cluster\[(\d+),\s*(\d+),.*\]", cluster):
        return min(_CORES_MAX, int(several[1]) * int(several[2]))
    return _CORES_MAX


BATCHES: Final = Kind(
    name="batches",
    driver="recovery.drill.driver.batch_driver:run",
    rows=sink.rows_in,
    in_slots=False,
    commits=frozenset({"sync", "async"}),
)
CONTINUOUS: Final = Kind(
    name="continuous",
    driver="recovery.drill.driver.continuous_driver:run",
    rows=files.rows_in,
    in_slots=True,
    commits=frozenset({"sync"}),
)
KINDS: Final[dict[str, Kind]] = {kind.name: kind for kind in (BATCHES, CONTINUOUS)}
