"""What must be so of a continuous job: its output, its state, and what is left in its store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from snapshot.formats.record import Record
from tests.sim.checkers.garbage import Garbage
from tests.sim.checkers.ledger import Checker

if TYPE_CHECKING:
    from tests.sim.continuous.world import World

__all__ = ["Leftovers", "Output", "State", "Stopped"]


class Stopped(Exception):
    """A checker has seen enough."""


class Output(Checker):
    """Each row once, with its own number: none is missing before another of its key.

    Attributes:
        seen: what was committed. rows: how many.
    """

    name = "output"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.seen: set[Any] = set()
        self.rows = 0
        self._last: dict[int, int] = {}  # by key

    def committed(self, staged: Any, rows: list[tuple[int, int, int]]) -> None:
        """The sink has made this visible."""
        self.seen.add(staged)
        for key, n, id in rows:
            last = self._last.get(key, 0)
            if n != last + 1:
                self.violated(f"row {n} of key {key} came after row {last}: {staged}")
            if (self.world.model.key(id), self.world.model.rank(id)) != (key, n):
                self.violated(f"row {id} is not row {n} of key {key}")
            self._last[key] = n
            self.rows += 1

    def record(self, sequence: int, record: Record) -> None:
        """Counts epochs, and sees who has the job."""
        if record.manifest.kind == "claim":
            self.world.claimed(record.manifest.writer)
        elif record.manifest.operator == "sink":
            self.world.epochs += 1

    def deleted(self, name: str) -> None:
        """Cleaning is at work."""
        self.world.sched.note("objects deleted", name)


class State(Checker):
    """What the processor finds is what the rows and rules before made."""

    name = "state"

    def numbered(self, id: int, n: int) -> None:
        """A row is about to be counted as its key's ``n``-th."""
        if n != self.world.model.rank(id):
            self.violated(f"row {id} was numbered {n}, not {self.world.model.rank(id)}")

    def ruled(self, number: int, rules: list[str], texts: list[str]) -> None:
        """Rule ``number`` is about to be taken, where these are in force."""
        text = self.world.model.content(number)
        expected = [text] if text else []
        if rules != expected:
            self.violated(f"the rules are {rules} and not {expected} before rule {number}")
        if set(texts) - {text} or (texts != expected and not self.world.rescaled):
            self.violated(f"the list is {texts} and not {expected} before rule {number}")


class Leftovers(Garbage):
    """As `Garbage`; whether the job comes back is seen by starting it, again and again."""

    def _drivers_own(self) -> None:
        """With several operators what nobody needs goes some records later."""

    def _restorable(self, manifests: Any) -> None:
        """See the class."""
