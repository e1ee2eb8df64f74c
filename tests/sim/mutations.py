"""Planted bugs: each breaks one rule of the protocol, and a checker must show it.

A mutation is what a person might have written instead. It is put into the real code for as long as
one world runs. ``world`` says what kind of world it needs to show: a rule about twins is not broken
where there are none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.sim import planted, planted_savepoints
from tests.sim.config import Config
from tests.sim.planted import Patches

__all__ = ["MUTATIONS", "Mutation", "adjust", "applied"]


@dataclass(frozen=True)
class Mutation:
    """One planted bug.

    Attributes:
        what: the rule, as it is broken. shows_in: the checkers that may find it.
        patches: what is put where. world: fields of the config that it needs.
    """

    what: str
    shows_in: tuple[str, ...]
    patches: Callable[[], Patches]
    world: Mapping[str, Any] = field(default_factory=dict)


_OTHER_ROWS = {
    "indeterminate": True,
    "zombies": False,
    "second_driver_every_s": 0.0,
    "partial": 0.0,
    "reruns": 0.3,
    "looks": 0.3,
    "twins": 0.3,
    "worker_frozen_every_s": 0.7,
    "driver_killed_every_s": 6.0,
    "parallelism": 3,
}
_DRIVERS_DIE = {"driver_killed_every_s": 2.0, "query_stopped_every_s": 3.0, "parallelism": 2}
_CLEANING = {"clean_every_epochs": 1, "clean_min_age_s": 0.0, "driver_killed_every_s": 4.0}
_BASES = {
    **_CLEANING,
    "large_bytes": 1 << 30,
    "apart_every_epochs": 2,
    "base_every_epochs": 3,
    "store_s": 0.03,
}
_RECORDS_LOST = {
    **_DRIVERS_DIE,
    "asynchronous": True,
    "zombies": False,
    "commit_timeout_s": 20.0,
    "store_faults": 0.15,
    "outage_every_s": 4.0,
    "driver_killed_every_s": 1.5,
}
_RESCALED = {
    "driver_killed_every_s": 2.0,
    "query_stopped_every_s": 1.0,
    "rescale": 0.8,
    "rows": 80,
    "row_s": 0.0005,
}
_TWO_DRIVERS = {
    "zombies": True,
    "indeterminate": False,
    "driver_frozen_every_s": 2.0,
    "second_driver_every_s": 3.0,
}


_SAVING = {"savepoint_every_s": 0.2, "outage_every_s": 0.0}
_SAVED = "savepoints"
_ONCE, _OUT, _ONE, _REF, _LEFT, _STUCK = (
    "exactly once",
    "output",
    "single writer",
    "references",
    "garbage",
    "liveness",
)

MUTATIONS: dict[str, Mutation] = {
    "first attempt wins": Mutation(
        "an ack is kept against those of newer attempts",
        (_ONCE,),
        planted.first_attempt_wins,
        _OTHER_ROWS,
    ),
    "last ack wins": Mutation(
        "an older attempt's late ack takes the place of a newer one's",
        (_ONCE,),
        planted.last_ack_wins,
        _OTHER_ROWS,
    ),
    "a look counts": Mutation(
        "a part that another action evaluates takes the place of what the sink has",
        (_ONCE,),
        planted.a_look_counts,
        {**_OTHER_ROWS, "reruns": 0.0, "looks": 0.5},
    ),
    "no superseding record": Mutation(
        "an epoch's first record stays, whatever is acked after it",
        (_ONCE,),
        planted.no_superseding_record,
        _OTHER_ROWS,
    ),
    "ack without barrier": Mutation(
        "the end of the input is taken for its barrier",
        (_ONCE, _OUT),
        planted.ack_without_barrier,
        {"truncated": 0.1},
    ),
    "claim records deleted": Mutation(
        "a claim below what is needed goes as a checkpoint does",
        (_REF,),
        planted.claims_deleted,
        _CLEANING,
    ),
    "delta applied before it is durable": Mutation(
        "RocksDB takes an epoch in before its record is written",
        (_ONCE,),
        planted.applied_too_early,
        {**_OTHER_ROWS, "asynchronous": False, "sink_fails": 0.05},
    ),
    "retention by record": Mutation(
        "what is needed is counted from the newest record, not from the confirmed epoch",
        (_ONCE, _REF),
        planted.retention_by_record,
        {**_CLEANING, **_DRIVERS_DIE},
    ),
    "epoch before pruned too early": Mutation(
        "what epoch n - 1 needs goes when n is durable, not when it is confirmed",
        (_ONCE, _REF),
        planted.pruned_too_early,
        {**_CLEANING, **_OTHER_ROWS, "base_every_epochs": 1, "large_bytes": 0},
    ),
    "a taken slot is success": Mutation(
        "a commit that finds another's record takes itself for committed",
        (_ONCE, _ONE, _REF),
        planted.taken_slot_is_success,
        _TWO_DRIVERS,
    ),
    "unknown is success": Mutation(
        "a commit without an answer is taken for done",
        (_ONCE, _ONE, _REF),
        planted.unknown_is_success,
        {"store_faults": 0.1, "commit_timeout_s": 0.0},
    ),
    "generation not raised": Mutation(
        "a claim goes on with the generation that it found",
        (_ONE,),
        planted.generation_not_raised,
        _DRIVERS_DIE,
    ),
    "two epochs ahead": Mutation(
        "with asynchronous commits the last ack does not wait for the record before",
        (_ONCE,),
        planted.no_wait_for_the_record_before,
        {**_DRIVERS_DIE, "asynchronous": True, "store_s": 0.05},
    ),
    "ack before the record": Mutation(
        "with synchronous commits the last ack returns while the record is being written",
        (_ONCE,),
        planted.ack_before_the_record,
        {**_DRIVERS_DIE, "asynchronous": False},
    ),
    "grants ignored": Mutation(
        "cleaning does not ask which bases are being uploaded",
        (_REF, _ONCE),
        planted.grants_ignored,
        _BASES,
    ),
    "lapsed grants count": Mutation(
        "a base is taken although its grant has lapsed and its objects may be gone",
        (_REF, _ONCE),
        planted.lapsed_grants_count,
        {**_BASES, "base_lease_s": 0.1, "worker_frozen_every_s": 0.3, "rows": 20},
    ),
    "pending acks ignored": Mutation(
        "cleaning deletes objects of acks that no record names yet",
        (_REF, _ONCE),
        planted.pending_ignored,
        {
            **_CLEANING,
            "inline_budget_bytes": 0,
            "parallelism": 3,
            "rows": 20,
            "row_s": 0.0005,
            "store_s": 0.03,
            "asynchronous": True,
        },
    ),
    "garbage is kept": Mutation(
        "slices that nobody names are never deleted",
        (_LEFT,),
        planted.garbage_is_kept,
        {**_CLEANING, "inline_budget_bytes": 0},
    ),
    "bases are kept": Mutation(
        "files of bases that nobody names are never deleted",
        (_LEFT,),
        planted.bases_are_kept,
        _BASES,
    ),
    "only the commit is taken back": Mutation(
        "a rewind leaves the next batch's plan, so that Spark skips one",
        (_OUT, _ONCE, _STUCK),
        planted.only_the_commit_taken_back,
        _RECORDS_LOST,
    ),
    "no rewind": Mutation(
        "a commit of Spark's stays although its record was lost",
        (_OUT, _ONCE, _STUCK),
        planted.no_rewind,
        _RECORDS_LOST,
    ),
    "taken for good": Mutation(
        "a start that goes back does not ask who has claimed the job since, and nobody puts back",
        (_STUCK, _OUT, _ONCE),
        planted.taken_for_good,
        {
            **_TWO_DRIVERS,
            "start_frozen": 0.7,
            "asynchronous": False,
            "checked": False,
            "partial": 0.3,
            "rows": 20,
        },
    ),
    "no lease": Mutation(
        "a local store is opened without its lease",
        (_ONE,),
        planted.no_lease,
        {"twins": 0.3, "worker_frozen_every_s": 0.7, "workers": 2},
    ),
    "files taken over by name": Mutation(
        "a base names files of the base before by their names alone",
        (_ONCE, _REF),
        planted.files_by_name,
        {**_BASES, "whole_limit_bytes": 0, "host_lost_every_s": 3.0, "hosts": 2},
    ),
    "an overtaken driver goes on": Mutation(
        "a batch is repeated from which another driver has gone on since it was planned",
        (_ONCE, _REF, _STUCK),
        planted.overtaken_goes_on,
        {
            **_TWO_DRIVERS,
            "driver_frozen_every_s": 0.0,
            "second_driver_every_s": 0.5,
            "driver_killed_every_s": 4.0,
            "parallelism": 1,
            "rows": 20,
            "row_s": 0.0005,
            "store_s": 0.05,
            "flipped_read": 0.0,
        },
    ),
    "parents are not needed": Mutation(
        "what a subtask's parents need is not counted before it has a base of its own",
        (_REF, _ONCE, _LEFT),
        planted.parents_not_needed,
        {**_CLEANING, **_RESCALED, "base_every_epochs": 12},
    ),
    "parents are forgotten": Mutation(
        "a subtask's parents are pruned with its first epochs, and it is taken for new",
        (_ONCE, _REF),
        planted.parents_forgotten,
        {**_RESCALED, "base_every_epochs": 12, "host_lost_every_s": 2.0},
    ),
    "rows are not clipped": Mutation(
        "all of a parent's delta goes into each of its children",
        (_ONCE,),
        planted.rows_not_clipped,
        _RESCALED,
    ),
    "a child without its base is empty": Mutation(
        "a subtask whose base is damaged is taken to have begun with nothing",
        (_ONCE,),
        planted.any_origin_known,
        {
            **_CLEANING,
            **_RESCALED,
            "host_lost_every_s": 1.0,
            "large_bytes": 1 << 30,
            "apart_every_epochs": 2,
            "whole_limit_bytes": 1 << 20,
            "store_s": 0.004,
            "rows": 160,
            "keys": 20,
        },
    ),
    "local folders by index": Mutation(
        "subtasks of the same number share a folder, whatever their key groups are",
        (_ONE, _ONCE),
        planted.folder_by_index,
        _RESCALED,
    ),
    "a parent's copy as it is": Mutation(
        "a local copy of a parent is taken wherever it stands",
        (_ONCE,),
        planted.ancestor_as_it_is,
        _RESCALED,
    ),
    "a half made child": Mutation(
        "a child has its marker before its parents' deltas are in it",
        (_ONCE,),
        planted.child_marked_first,
        {
            **_RESCALED,
            "worker_killed_every_s": 0.2,
            "inline_budget_bytes": 0,
            "base_every_epochs": 12,
            "store_s": 0.03,
        },
    ),
    "savepoint.json first": Mutation(
        "a savepoint is said to be complete before its state is there",
        (_SAVED,),
        planted_savepoints.json_first,
        _SAVING,
    ),
    "a savepoint of what Spark has not committed": Mutation(
        "the epoch is taken from the log's tip, and the location is not asked",
        (_SAVED,),
        planted_savepoints.tip_of_the_log,
        _SAVING,
    ),
    "the cleaner is not held": Mutation(
        "a driver cleans while it makes a savepoint",
        (_SAVED,),
        planted_savepoints.cleaner_not_held,
        {**_SAVING, **_CLEANING},
    ),
    "a cut beginning is taken for done": Mutation(
        "a job has begun with a savepoint as soon as it has claimed its log",
        (_SAVED,),
        planted_savepoints.cut_is_begun,
        {**_SAVING, "store_s": 0.03},
    ),
    "marker first": Mutation(
        "the marker is set before the rows that it stands for",
        (_ONCE,),
        planted.marker_first,
        {"spontaneous_flush": 0.3, "worker_killed_every_s": 0.3, "rows": 80, "keys": 20},
    ),
}


def adjust(name: str, config: Config) -> None:
    """Make a world in which the mutation has a chance."""
    if name:
        config.rescale = config.rebalance_every_s = config.savepoint_every_s = 0.0
        config.flipped_base = 0.0  # or what is lost would be put down to that
        for field_name, value in MUTATIONS[name].world.items():
            setattr(config, field_name, value)


@contextlib.contextmanager
def applied(name: str) -> Iterator[None]:
    """While open, the product has this bug; without a name none."""
    before: list[tuple[Any, str, Any]] = []
    try:
        for where, attribute, value in MUTATIONS[name].patches() if name else ():
            before.append((where, attribute, getattr(where, attribute, None)))
            setattr(where, attribute, value)
        yield
    finally:
        for where, attribute, value in reversed(before):
            if value is None:
                delattr(where, attribute)
            else:
                setattr(where, attribute, value)
