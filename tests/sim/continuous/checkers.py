"""What must be so of a continuous job: its output, its state, and what is left in its store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from snapshot.formats.record import Record
from tests.sim.checkers.garbage import Garbage
from tests.sim.checkers.ledger import Checker, Stopped

if TYPE_CHECKING:
    from tests.sim.continuous.world import World

__all__ = ["Leftovers", "Output", "State", "Stopped"]


Lane: TypeAlias = tuple[int, bool, int]  # of a key, or of timers; in which bucket
Numbered: TypeAlias = tuple[int, int, int]  # key, number, id


class Output(Checker):
    """Each row once, with its own number: none is missing before another of its lane.

    A lane is what stays in order: a key's rows, or what its timers gave; after a second operator
    those of one bucket.

    Attributes:
        seen: what was committed. rows: how many.
    """

    name = "output"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.seen: set[Any] = set()
        self.rows = 0
        self._last: dict[Lane, int] = {}
        self._begins: tuple[dict[Lane, int], dict[Lane, int] | None] | None = None

    def marks(self) -> dict[Lane, int]:
        """The last row of each lane."""
        return dict(self._last)

    def begin_between(self, first: dict[Lane, int], last: dict[Lane, int] | None) -> None:
        """The job begins with a savepoint.

        Args:
            first: what had been committed when it was asked for. last: once it was there; None:
                some of the savepoint's may not have been committed.
        """
        self._begins = first, last

    def _before(self, lane: Lane, n: int) -> int:
        """The row of a lane after which the ``n``-th has come, if that is right."""
        if lane in self._last or self._begins is None:
            return self._last.get(lane, 0)
        first, last = self._begins
        if n <= first.get(lane, 0):
            self.violated(f"row {n} of lane {lane} is older than the savepoint")
        return n - 1 if last is None else min(n - 1, last.get(lane, 0))

    def committed(self, staged: Any, rows: list[Numbered]) -> None:
        """The sink has made this visible."""
        self.seen.add(staged)
        for row in rows:
            lane = self.world.state.lane_of(*row)
            last = self._before(lane, row[1])
            if wrong := self.world.state.wrong(lane, last, row):
                self.violated(f"{wrong}: {staged}")
            self._last[lane] = row[1]
            self.rows += 1

    def lacks_timers(self, at_ms: int) -> str:
        """The output of a timer up to then that is not committed; "": there is none."""
        state, times = self.world.state, self.world.times
        for owner in times.owners(at_ms):
            if owner >= 0 or self.world.config.chained:
                due = times.timers_until(owner, at_ms)
                lanes = {state.lane_of(owner, n, -ms) for n, ms in enumerate(due, 1)}
                if max(self._last.get(lane, 0) for lane in lanes) < len(due):
                    return f"{len(due)} timers of {owner} were due"
        return ""

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

    def lane_of(self, key: int, n: int, id: int) -> Lane:
        """In which order a row of the output stands; the id of a timer's is minus its time."""
        return key, id < 0, self.world.model.bucket(id) if self.world.config.chained else 0

    def wrong(self, lane: Lane, last: int, row: Numbered) -> str:
        """Why a row does not come after the ``last``-th of its lane; "": it does."""
        key, n, id = row
        model, chained = self.world.model, self.world.config.chained
        if id < 0:
            ids = [-at_ms for at_ms in self.world.times.timers_until(key, -id)]
        elif (model.key(id), model.rank(id)) == (key, n):
            ids = model.ids(key, n)
        else:
            return f"row {id} is not row {n} of key {key}"
        if len(ids) != n or ids[-1] != id:
            return f"timer {-id} is not timer {n} of {key}"
        between = [one for one in ids[last:-1] if not chained or model.bucket(one) == lane[2]]
        if n <= last or between:
            return f"row {n} of lane {lane} came after row {last}"
        return ""

    def came(self, last: int, row: Numbered) -> None:
        """A row is about to be taken by the second operator after the ``last``-th of its lane."""
        if wrong := self.wrong(self.lane_of(*row), last, row):
            self.violated(wrong)

    def timers_are(self, ids: Iterable[int], fired: int, found: list[int]) -> None:
        """These timers are set where so many have fired, and these rows were seen."""
        expected = self.world.times.pending(ids, fired)
        if found != expected:
            self.violated(f"the timers are {found} and not {expected} after {fired} have fired")

    def fires(self, owner: int, at_ms: int, n: int, ranks: Mapping[int, int]) -> None:
        """A timer fires as its owner's ``n``-th, where so many rows of each key were seen."""
        self.world.sched.note("timer of a bucket fired" if owner < 0 else "timer fired", str(owner))
        timers = self.world.times.timers_until(owner, at_ms)
        if len(timers) != n or timers[-1] != at_ms:
            self.violated(f"timer {at_ms} of {owner} fired as number {n}, not {len(timers)}")
        for key, rank in self.world.times.ranks_until(owner, at_ms).items():
            if ranks.get(key, 0) < rank:
                self.violated(f"timer {at_ms} of {owner} fired before row {rank} of key {key}")

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
