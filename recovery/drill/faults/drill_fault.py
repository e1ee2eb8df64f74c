"""A kind of fault: its name, what it does, what must hold all the same, and what it needs."""

from __future__ import annotations

import random as random_numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from recovery.drill.faults.stage import Stage

__all__ = ["DrillFault", "Need"]

Need = Literal["two-hosts", "s3", "async", "sync", "batches", "compiler", "root", "timers"]


@dataclass(frozen=True, kw_only=True)
class DrillFault:
    """A kind of fault.

    Attributes:
        name: words with hyphens, as the command line takes it: `executor-killed`.
        summary: what happens, one sentence. promise: what holds all the same, one sentence.
        strike: makes it happen: `strike(stage, rng)` gives the target's name. It may block while
            the fault lasts, and takes back what must be taken back. Raises `CannotStrikeError` with
            the reason where this machine or this job has not what it takes.
        needs: what the drill must be set up with.
        conf: Spark settings without which it does not show.
        settings: the backend's settings without which it does not show.
        weight: how often a random soak draws it, against the others; 0: never.
    """

    name: str
    summary: str
    promise: str
    strike: Callable[[Stage, random_numbers.Random], str]
    needs: frozenset[Need] = frozenset()
    conf: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    weight: int = 1
