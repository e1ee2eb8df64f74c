"""The continuous simulation's planted bugs; most are the running job's, put in here as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from statebackend.runtime.worker.operator_state_io import OperatorStateIO
from tests.continuous.runtime import planted as running
from tests.continuous.state.content import names_outlive_objects
from tests.planted.bug import Patches, PlantedBug, Simulation, by_name
from tests.sim import planted as batches
from tests.sim.continuous.world import Result, simulate

__all__ = ["BUGS", "SIMULATION", "simulate_task"]

_EVENTS = 6_000
_SPLIT_UP = {"inline_budget_bytes": 0, "retain_epochs": 1, "clean_every_epochs": 1}


def lists_are_forgotten() -> Patches:
    """What an operator's lists held is not given back; broadcast maps are."""
    really = OperatorStateIO.read

    def read(self: OperatorStateIO, reply: Any) -> Any:
        found = really(self, reply)
        return type(found)({}, found.maps) if self.operator == "op" else found

    yield OperatorStateIO, "read", read


def _bug(
    name: str,
    what: str,
    patches: Callable[[], Patches],
    shows_in: tuple[str, ...],
    issue18: str = "",
    **world: Any,
) -> PlantedBug:
    return PlantedBug(name, what, shows_in, patches, world, issue18=issue18)


BUGS: Final = by_name(
    _bug(
        "a name outlives its object",
        "a subtask keeps the names of objects for the life of a run, and nobody refuses an old one",
        names_outlive_objects,
        ("references",),
        issue18="1",
        **_SPLIT_UP,
    ),
    _bug(
        "an operator's lists are forgotten",
        "what an operator's lists held is not given back",
        lists_are_forgotten,
        ("state",),
    ),
    _bug(
        "nothing is blocked",
        "rows behind an early barrier are in an exactly-once snapshot",
        running.nothing_is_blocked,
        ("output", "state"),
        slot_killed_every_s=3.0,
        hop_s=0.05,
        rate=15.0,
        parallelism=3,
    ),
    _bug(
        "positions are lost",
        "a restored split is read from its start",
        running.positions_are_lost,
        ("output", "state"),
    ),
    _bug(
        "offsets of the next batch",
        "a source's position is taken after a batch that goes behind the barrier",
        running.offsets_of_the_next_batch,
        ("output", "state"),
        slot_killed_every_s=3.0,
        rate=15.0,
    ),
    _bug(
        "an epoch of one record",
        "an epoch counts when the first of its vertices has its record",
        running.an_epoch_of_one_record,
        ("output", "state", "life"),
        driver_killed_every_s=2.0,
        interval_s=0.2,
    ),
    _bug(
        "committed before the record",
        "output shows before its checkpoint is durable",
        running.committed_before_the_record,
        ("output",),
        driver_killed_every_s=2.0,
        interval_s=0.2,
    ),
    _bug(
        "not committed after a restore",
        "what the restored checkpoint had prepared is left, and swept",
        running.not_committed_after_a_restore,
        ("output",),
        driver_killed_every_s=2.0,
        interval_s=0.2,
    ),
    _bug(
        "prepared is not repeated",
        "output that an aborted attempt had prepared is in no later one",
        running.prepared_is_not_repeated,
        ("output",),
        outage_every_s=5.0,
    ),
    _bug(
        "confirmed with those behind",
        "what was frozen for a later attempt is taken for durable with an earlier one",
        running.confirmed_with_those_behind,
        ("output", "state", "error"),
        concurrent=3,
        alignment_timeout_s=None,
        slot_killed_every_s=3.0,
    ),
    _bug(
        "pending ignored",
        "what a run has made, and no record names yet, is deleted",
        batches.pending_ignored,
        ("references",),
        **_SPLIT_UP,
    ),
    _bug(
        "garbage is kept",
        "objects of slices that nobody needs stay for ever",
        batches.garbage_is_kept,
        ("garbage",),
        **_SPLIT_UP,
    ),
)


_LONG: Final = frozenset({"an epoch of one record"})


def _simulate(seed: int, bug: PlantedBug | None) -> Result:
    return simulate(seed, events=_EVENTS, bug=bug)


def simulate_task(task: tuple[int, int, str | None]) -> Result:
    """One seed for a pool of processes: seed, events, name of a planted bug."""
    seed, events, bug = task
    return simulate(seed, events=events, bug=BUGS.get(bug or ""))


SIMULATION: Final = Simulation(
    "continuous", BUGS, _simulate, seeds=20, minutes=_LONG, clean_seeds_max=16
)
