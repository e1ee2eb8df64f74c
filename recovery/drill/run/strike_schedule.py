"""Which fault strikes when: a function of a seed, which so replays a drill."""

from __future__ import annotations

import random as random_numbers
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recovery.drill.faults.drill_fault import DrillFault

__all__ = ["Strike", "drawn_seed", "planned", "soak", "target_rng"]


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One fault and when it strikes: once Spark has committed `after_epoch`."""

    fault: DrillFault
    after_epoch: int


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


def drawn_seed() -> int:
    """A seed for a drill that was given none."""
    return secrets.randbelow(1 << 31)
