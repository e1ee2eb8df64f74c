"""Planted bugs that show in an unkind world; see `bugs`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import recovery.decide.start_batch
from recovery.decide.start_batch import LocationProgress, StartDecision
from snapshot.log import commit_log as log
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.stamps import Stamps
from statebackend.errors import JobRunningError, RewindError
from statebackend.runtime.driver import job, job_start
from statebackend.spark.start import start_point as startpoint
from statebackend.spark.start.location_rewind import LocationRewind
from tests.planted.bug import Patches, PlantedBug
from tests.sim import chaos, world
from tests.sim.task import SimEpoch

__all__ = ["bugs"]

_FROZEN = {
    "calls_frozen": 0.8,
    "zombies": True,
    "indeterminate": False,
    "second_driver_every_s": 2.0,
    "driver_frozen_every_s": 0.0,
    "clean_every_epochs": 1,
    "clean_min_age_s": 0.0,
    "retain_epochs": 1,
    "base_every_epochs": 1,
    "rows": 20,
    "row_s": 0.0005,
}
_ONE_KEPT = {
    "batches_kept": 1,
    "takes_way_out": False,
    "partial": 0.3,
    "checked": False,
    "asynchronous": False,
    "indeterminate": False,
    "zombies": False,
    "second_driver_every_s": 0.0,
}
_LATE = {
    "listing_lag_s": 2.0,
    "clean_every_epochs": 1,
    "driver_killed_every_s": 1.0,
    "query_stopped_every_s": 1.0,
    "second_driver_every_s": 0.5,
    "zombies": True,
    "indeterminate": False,
    "rows": 20,
    "row_s": 0.0005,
}
_CLOCKS = {"clock_jumps_every_s": 0.1, "zombies": False, "second_driver_every_s": 0.0}


def bugs(make: Callable[..., PlantedBug]) -> Iterator[PlantedBug]:
    """All of them.

    Args:
        make: makes one, of its name, its rule, its checkers, its patches and its world.
    """
    yield make(
        "the later time is the newer attempt",
        "attempts are told apart by what their hosts' clocks say, not by Spark's number",
        ("exactly once", "needed"),
        attempts_by_time,
        {**_CLOCKS, "indeterminate": True, "partial": 0.0, "reruns": 0.3, "twins": 0.3, "hosts": 3},
    )
    yield make(
        "times only grow",
        "a batch whose time is before that of the batch before is taken for an old one",
        ("liveness",),
        times_only_grow,
        {**_CLOCKS, "driver_killed_every_s": 0.0},
    )
    yield make(
        "the log is not read after the claim",
        "a driver goes on from what it read of the log before it claimed the job",
        ("single writer", "exactly once", "references", "liveness", "needed"),
        not_read_after_the_claim,
        _FROZEN,
    )
    yield make(
        "a cleaner looks before it lists",
        "what is made between the look and the listing is taken for what nobody needs",
        ("references", "exactly once"),
        looks_before_it_lists,
        {**_FROZEN, "outside_clean_every_s": 0.5, "inline_budget_bytes": 0},
    )
    yield make(
        "a refusal does not say what is missing",
        "a start that lacks files of the location says neither which nor what to set",
        ("liveness",),
        missing_not_named,
        _ONE_KEPT,
    )
    yield make(
        "the plan before is not looked for",
        "before a commit is taken back, only the plan of its own batch is looked for",
        ("location", "liveness"),
        plan_before_not_looked_for,
        _ONE_KEPT,
    )
    yield make(
        "what was taken is never put back",
        "a start does not undo what another one took back before it was cut off",
        ("liveness",),
        never_put_back,
        {
            **_FROZEN,
            "asynchronous": False,
            "checked": False,
            "partial": 0.3,
            "start_frozen": 0.7,
            "driver_killed_every_s": 1.0,
        },
    )
    yield make(
        "a claim stands for a driver that runs",
        "a start refuses a log that ends with a claim: its driver is taken to be starting",
        ("liveness",),
        claims_refuse,
        {"driver_killed_every_s": 1.0, "zombies": False, "second_driver_every_s": 0.0},
    )
    yield make(
        "a listing without the own claim will do",
        "a start goes by a listing that is older than the claim that it has just written",
        ("exactly once", "liveness", "output", "references", "single writer"),
        old_listing_will_do,
        _LATE,
    )
    yield make(
        "an old listing is judged by",
        "a start says what the log lacks by a listing that ends before a record that is there",
        ("references",),
        old_listing_is_judged_by,
        {
            **_LATE,
            "zombies": False,
            "second_driver_every_s": 0.0,
            "flipped_read": 0.0,
            "retain_epochs": 1,
            "clean_min_age_s": 0.0,
        },
    )


# --- clocks --------------------------------------------------------------------------------------


def attempts_by_time() -> Patches:
    really = SimEpoch.__init__

    def made(self: SimEpoch, attempt: Any, worker: Any) -> None:
        really(self, attempt, worker)
        self._context.attempt = number = worker.system.wall_ms()
        member = self._participant.member
        self._participant.member = dataclasses.replace(member, attempt=number)

    yield SimEpoch, "__init__", made


def times_only_grow() -> Patches:
    really = Stamps.bind

    def bind(self: Stamps, stamp_ms: int, *of: str | int) -> bool:
        late = self.current is not None and stamp_ms < self.current - 60_000
        return not late and really(self, stamp_ms, *of)

    yield Stamps, "bind", bind


# --- frozen calls --------------------------------------------------------------------------------


def not_read_after_the_claim() -> Patches:
    really = CommitLog.manifests

    def manifests(self: CommitLog, listed: Any = None) -> Any:
        found = self.__dict__["read_last"] = really(self, listed)
        return found

    def held_before(log: CommitLog, tenure: Any, **more: Any) -> Any:
        return log.__dict__["read_last"]

    yield CommitLog, "manifests", manifests
    yield job_start, "held_before", held_before


def looks_before_it_lists() -> Patches:
    for module in (chaos, world):
        really = module.clean

        def clean(store: Any, look: Any, really: Any = really, **more: Any) -> Any:
            view = look()
            return really(store, lambda: view, **more)

        yield module, "clean", clean


# --- few batches kept, and no way out -------------------------------------------------------------


def missing_not_named() -> Patches:
    def require(location: LocationProgress, decision: StartDecision) -> None:
        if recovery.decide.start_batch.lacks_for(location, decision.batch):
            raise RewindError(f"{location.path} lacks files.")

    yield recovery.decide.start_batch, "_require_files", require


def plan_before_not_looked_for() -> Patches:
    really = recovery.decide.start_batch.lacks_for

    def lacks_for(location: LocationProgress, batch: int) -> list[str]:
        return [name for name in really(location, batch) if name.endswith(f"/{batch}")]

    yield recovery.decide.start_batch, "lacks_for", lacks_for


def never_put_back() -> Patches:
    yield LocationRewind, "repair", lambda self, recorded: None


def claims_refuse() -> Patches:
    def refuse(job: str, manifests: Any) -> None:
        if manifests and manifests[-1].kind == "claim":
            raise JobRunningError("Another driver is starting the job.")

    yield job_start, "_refuse_half_begun", refuse


# --- late listings -------------------------------------------------------------------------------


def old_listing_will_do() -> Patches:
    for module in (log, job):
        yield module, "check_listed", lambda newest, claim: None


def old_listing_is_judged_by() -> Patches:
    for module in (log, startpoint):
        yield module, "has_grown", lambda *asked: False
