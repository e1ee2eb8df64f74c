"""The continuous simulation's planted bugs; most are the running job's, put in here as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tests.continuous.runtime import planted as running
from tests.continuous.state.content import names_outlive_objects
from tests.planted.bug import Patches, PlantedBug, Simulation, by_name
from tests.sim import planted as batches
from tests.sim.continuous import planted as own
from tests.sim.continuous.world import Result, simulate

__all__ = ["BUGS", "SIMULATION", "simulate_task"]

_EVENTS = 6_000
# A bug's world has what a job may have besides only if it asks.
_PLAIN = {"timed": False, "chained": False, "savepoint_every_s": 0.0, "beside": False}
_SPLIT_UP = {"inline_budget_bytes": 0, "retain_epochs": 1, "clean_every_epochs": 1}


def _bug(
    name: str,
    what: str,
    patches: Callable[[], Patches],
    shows_in: tuple[str, ...],
    issue18: str = "",
    **world: Any,
) -> PlantedBug:
    return PlantedBug(name, what, shows_in, patches, {**_PLAIN, **world}, issue18=issue18)


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
        own.lists_are_forgotten,
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
    _bug(
        "the fastest channel counts",
        "an operator's watermark is the largest of its channels'",
        own.the_fastest_channel_counts,
        ("output", "state"),
        timed=True,
        parallelism=3,
    ),
    _bug(
        "watermarks overtake rows",
        "a watermark goes ahead of rows that it speaks for",
        own.watermarks_overtake_rows,
        ("output", "state"),
        timed=True,
        chained=True,
        rate=15.0,
        parallelism=3,
    ),
    _bug(
        "timers set before are not seen",
        "a restored subtask takes what is set in its store for fired",
        own.timers_set_before_are_not_seen,
        ("output", "state", "life"),
        timed=True,
        slot_killed_every_s=3.0,
    ),
    _bug(
        "nothing is blocked behind",
        "rows behind an early barrier are in the snapshot of the second operator in a row",
        own.nothing_is_blocked_behind,
        ("output", "state"),
        chained=True,
        alignment_timeout_s=None,
        slot_killed_every_s=3.0,
        hop_s=0.05,
        rate=15.0,
        parallelism=3,
    ),
    _bug(
        "sinks are not waited for",
        "a checkpoint is acked when its output was begun, and not when it is safe",
        own.sinks_are_not_waited_for,
        ("output",),
    ),
    _bug(
        "a sink that failed declines",
        "a sink that lost rows behind the barrier costs its checkpoint, and the run goes on",
        own.a_sink_that_failed_declines,
        ("output",),
        sink_fails=0.05,
    ),
    _bug(
        "positions stay behind",
        "a job that begins with a savepoint reads its sources from their start",
        own.positions_stay_behind,
        ("output", "state"),
        savepoint_every_s=0.7,
    ),
    _bug(
        "prepared output is taken over",
        "what a savepoint's sinks had prepared is the new job's to commit as well",
        own.prepared_output_is_taken_over,
        ("output", "state", "life"),
        savepoint_every_s=0.5,
        rate=15.0,
    ),
    _bug(
        "a savepoint is what was there",
        "a savepoint has no checkpoint of its own, but the one before the last",
        own.a_savepoint_is_what_was_there,
        ("output", "state", "references"),
        savepoint_every_s=0.5,
        retain_epochs=2,
        rate=15.0,
        slot_frozen_every_s=0.0,
    ),
    _bug(
        "cleaning goes over other jobs",
        "a cleaning takes what lies in another job's folder for its own",
        own.cleaning_goes_over_other_jobs,
        ("references", "garbage"),
        **_SPLIT_UP,
        beside=True,
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
