"""The job that a drill runs, and how its truth is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from recovery.drill.jobs.job_kinds import KindName

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from statebackend.backend import StateBackend
    from statebackend.continuous.job.streams import ContinuousStream

__all__ = ["DrillJob"]

Build = Callable[["SparkSession", "StateBackend", Path], Union["DataFrame", "ContinuousStream"]]


@dataclass(frozen=True, kw_only=True)
class DrillJob:
    """A streaming job and how its truth is known.

    Every function is one of a module's top level: each driver of the drill is a process of its own
    and imports it by name.

    Attributes:
        name: as `drill list` shows it.
        summary: one sentence.
        build: `build(spark, backend, folder)` gives the streaming frame whose rows are checked. It
            reads what `feed` wrote below `folder` (one file a trigger, so that epochs are many).
            Of a continuous job it gives the `ContinuousStream`, which the drill starts.
        truth: `truth(folder)` gives the rows that the job must have put out when all input has been
            read, as tuples in the order of the frame's columns; made without Spark.
        feed: `feed(folder, number, seed)` writes input number 0, 1, 2, ... below `folder`, whole at
            once (write beside it, then rename). None: the input is there, and `inputs` is not used.
        inputs: how many inputs a drill without a duration writes.
        keys: names of columns. None: every row of the output counts, as often as it is there.
            Given: only the newest row of each key counts (a job that puts out updates).
        conf: Spark settings of the job.
        settings: the backend's settings.
        kind: `batches`, or `continuous`: a job without micro-batches.
        start: arguments of a continuous job's `start`, plain data; a drill's own are a checkpoint
            each second, and restarts while there are at most 15 in two minutes.
    """

    name: str
    build: Build
    truth: Callable[[Path], Iterable[Sequence[Any]]]
    feed: Callable[[Path, int, int], None] | None = None
    inputs: int = 12
    keys: tuple[str, ...] | None = None
    summary: str = ""
    conf: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    kind: KindName = "batches"
    start: Mapping[str, Any] = field(default_factory=dict)
