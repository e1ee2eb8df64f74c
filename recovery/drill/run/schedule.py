"""What a drill runs and what strikes it when: pure, so that a seed replays a drill."""

from __future__ import annotations

import random as random_numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from recovery.drill.jobs.drill_job import DrillJob

if TYPE_CHECKING:
    from recovery.drill.faults.stage import Stage

__all__ = [
    "DrillFault",
    "Need",
    "Scenario",
    "Strike",
    "planned",
    "soak",
    "target_rng",
]

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


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One fault and when it strikes: once Spark has committed `after_epoch`."""

    fault: DrillFault
    after_epoch: int


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A whole drill, decided before it begins."""

    job: DrillJob
    strikes: tuple[Strike, ...]
    seed: int
    duration_s: float | None = None
    commit: Literal["sync", "async"] = "sync"


def planned(
    faults: Sequence[DrillFault | Strike], *, seed: int, at_epoch: int | None = None
) -> tuple[Strike, ...]:
    """When each fault strikes, in the order in which they do: a function of the seed.

    Args:
        faults: those without an epoch of their own get `at_epoch`, or one that the seed draws: the
            first after epoch 1, 2 or 3, each next one to three epochs later.
    """
    rng = random_numbers.Random(f"plan:{seed}")
    strikes = []
    epoch = 0
    for fault in faults:
        if isinstance(fault, Strike):
            strikes.append(fault)
            continue
        epoch += rng.randint(1, 3)  # drawn also where it is not used: the others stay the same
        drawn = epoch if at_epoch is None else at_epoch
        strikes.append(Strike(fault=fault, after_epoch=drawn))
    return tuple(sorted(strikes, key=lambda strike: strike.after_epoch))


def soak(faults: Sequence[DrillFault], *, seed: int) -> Iterator[tuple[DrillFault, int]]:
    """Faults without end, each with how many epochs to let pass before it: a function of the seed.

    A fault is drawn as often as its weight says, against the others; nothing if none has any.
    """
    rng = random_numbers.Random(f"soak:{seed}")
    drawn = sorted((fault for fault in faults if fault.weight > 0), key=lambda fault: fault.name)
    weights = [fault.weight for fault in drawn]
    while drawn:
        yield rng.choices(drawn, weights)[0], rng.randint(1, 3)


def target_rng(seed: int, number: int, fault: str) -> random_numbers.Random:
    """What the strike with this number draws its target from."""
    return random_numbers.Random(f"strike:{seed}:{number}:{fault}")
