"""A planted bug: one rule of the protocol, broken as a person might have broken it.

It is put into the real code for as long as one run lasts, and some checker must show it. A bug that
none shows is a hole in the checkers, or in the model of the world that they look at.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

__all__ = ["Outcome", "Patches", "PlantedBug", "Simulation", "adjust", "by_name", "planted"]

# Whose attribute is changed, its name, and what it becomes.
Patches = Iterator[tuple[Any, str, Any]]

_ABSENT = object()


@dataclass(frozen=True)
class PlantedBug:
    """One rule, broken.

    Attributes:
        name: told apart from others of the same simulation by it.
        what: the rule, as it is broken.
        shows_in: the checkers that may find it, and no other.
        patches: what is put where, while it is planted.
        world: fields of the world's config that it needs to show: a rule about twins is not broken
            where there are none.
        issue18: the break of issue 18 that this is again, by its number there.
    """

    name: str
    what: str
    shows_in: tuple[str, ...]
    patches: Callable[[], Patches]
    world: Mapping[str, Any] = field(default_factory=dict)
    issue18: str = ""


class Outcome(Protocol):
    """What became of one run: what was violated, by checker, and how often what was noted."""

    @property
    def violations(self) -> list[tuple[str, str]]:
        """Checkers, and what they saw."""

    @property
    def counts(self) -> Counter[str]:
        """Notes, among them the faults that struck."""


@dataclass(frozen=True)
class Simulation:
    """Something that runs a world by its seed, and has checkers look at it.

    Attributes:
        simulate: runs one seed, with a bug planted or without.
        seeds: each of its bugs shows within so many.
        minutes: names of bugs that take minutes to show rather than seconds.
        clean_seeds_max: no more seeds than these are worth their time without a bug.
    """

    name: str
    bugs: Mapping[str, PlantedBug]
    simulate: Callable[[int, PlantedBug | None], Outcome]
    seeds: int
    minutes: frozenset[str] = frozenset()
    clean_seeds_max: int = 1_000_000


def by_name(*bugs: PlantedBug) -> dict[str, PlantedBug]:
    """Bugs of one simulation.

    Raises:
        ValueError: two have the same name.
    """
    found = {bug.name: bug for bug in bugs}
    if len(found) < len(bugs):
        raise ValueError("Two planted bugs have the same name.")
    return found


def adjust(config: Any, bug: PlantedBug | None) -> None:
    """Make a world in which the bug has a chance to show.

    Raises:
        AttributeError: the world has no such field.
    """
    known = {one.name for one in fields(config)}
    for name, value in bug.world.items() if bug else ():
        if name not in known:
            raise AttributeError(f"{type(config).__name__} has no field {name!r}.")
        setattr(config, name, value)


@contextlib.contextmanager
def planted(bug: PlantedBug | None) -> Iterator[None]:
    """While open, the code has this bug; afterwards it is as it was, also where nothing had been.

    An attribute that the owner only inherits is taken from it again, not copied into it.
    """
    with contextlib.ExitStack() as undo:
        for owner, name, value in bug.patches() if bug else ():
            undo.callback(_put_back, owner, name, vars(owner).get(name, _ABSENT))
            setattr(owner, name, value)
        yield


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, before)
