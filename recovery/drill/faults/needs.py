"""What a fault needs, and whether a drill has it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from recovery.drill.cluster.local_cluster import TWO_HOSTS
from recovery.drill.faults.drill_fault import DrillFault, Need

__all__ = ["Given", "missing"]


@dataclass(frozen=True, kw_only=True)
class Given:
    """How a drill is set up.

    Attributes:
        timers: whether the job sets timers; None: nobody knows, and it is taken for granted.
    """

    cluster: str
    s3: bool
    commit: str
    compiler: bool
    timers: bool | None = None
    kind: str = "batches"


_CHECKS: dict[Need, tuple[Callable[[Given], bool], str]] = {
    "two-hosts": (lambda given: given.cluster == TWO_HOSTS, "it needs cluster='two-hosts'"),
    "s3": (lambda given: given.s3, "it needs store='s3'"),
    "async": (lambda given: given.commit == "async", "it needs commit='async'"),
    "sync": (lambda given: given.commit == "sync", "it needs commit='sync'"),
    "batches": (lambda given: given.kind == "batches", "it needs a job of micro-batches"),
    "compiler": (lambda given: given.compiler, "it needs a C compiler, and there is none"),
    "root": (lambda given: os.geteuid() == 0, "it needs root"),
    "timers": (lambda given: given.timers is not False, "it needs a job with timers"),
}


def missing(fault: DrillFault, given: Given) -> str:
    """Why a fault cannot be made in such a drill; empty if it can."""
    return "; ".join(
        text
        for need, (has, text) in sorted(_CHECKS.items())
        if need in fault.needs and not has(given)
    )
