"""Planted bugs of whole jobs: what an operator has beside its keys; see `bugs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tests.planted.bug import Patches, PlantedBug
from tests.sim import planted_jobs

__all__ = ["OF_JOBS"]

_OPERATOR_STATE, _REF = "operator state", "references"
_SECOND, _STUCK = "second operator", "liveness"
_NOT_OF_IT: Final = {
    **dict.fromkeys(("rescale", "rebalance_every_s", "savepoint_every_s", "flipped_base"), 0.0),
    "timed": "",
    "initial": False,
}
_KEYLESS: Final = {"keyless": True, "rows": 20, "row_s": 0.0005}
_TWO: Final = {
    "second": "beside",
    "partial": 0.0,
    "second_driver_every_s": 0.0,
    "rows": 80,
    "row_s": 0.0005,
}
_CLEANING: Final = {
    "inline_budget_bytes": 0,
    "clean_every_epochs": 1,
    "clean_min_age_s": 0.0,
    "retain_epochs": 1,
}


def _bug(
    name: str,
    what: str,
    shows_in: tuple[str, ...],
    patches: Callable[[], Patches],
    world: Mapping[str, Any],
    issue18: str = "",
) -> PlantedBug:
    return PlantedBug(name, what, shows_in, patches, {**_NOT_OF_IT, **world}, issue18)


OF_JOBS: Final = (
    _bug(
        "an object's name outlives it",
        "operator state that is as it once was is named by an object of then",
        (_REF, _OPERATOR_STATE),
        planted_jobs.names_outlive_epochs,
        {**_KEYLESS, **_CLEANING},
        issue18="1",
    ),
    _bug(
        "records go before they are summed up",
        "cleaning deletes records whose summaries no object of the history has",
        ("history",),
        planted_jobs.not_summed_up,
        {"clean_every_epochs": 1, "clean_min_age_s": 0.0, "base_every_epochs": 3},
    ),
    _bug(
        "lists are not dealt out",
        "at another parallelism a subtask goes on with the lists of the one of its number",
        (_OPERATOR_STATE,),
        planted_jobs.not_dealt_out,
        {**_KEYLESS, "query_stopped_every_s": 1.0, "rescale": 0.8},
    ),
    _bug(
        "a look's lists are gone on from",
        "the next epoch begins with the operator state of the last acks, whatever was recorded",
        (_OPERATOR_STATE,),
        planted_jobs.look_is_gone_on_from,
        {
            **_KEYLESS,
            "indeterminate": True,
            "zombies": False,
            "second_driver_every_s": 0.0,
            "partial": 0.0,
            "looks": 0.5,
            "parallelism": 3,
        },
    ),
    _bug(
        "stage runs are compared",
        "subtasks of a stage that runs again are said to disagree with those of the run before",
        ("needed",),
        planted_jobs.runs_are_compared,
        {**_KEYLESS, "indeterminate": True, "reruns": 0.3, "parallelism": 3},
    ),
    _bug(
        "the first operator's need counts",
        "records and objects go once the first operator needs them no more",
        (_REF, _SECOND, _STUCK),
        planted_jobs.first_operator_counts,
        {**_TWO, **_CLEANING, "base_every_epochs": 3, "driver_killed_every_s": 3.0},
    ),
    _bug(
        "the first operator's record is waited for",
        "with asynchronous commits the second operator does not wait for its record before",
        (_SECOND,),
        planted_jobs.first_record_waited_for,
        {**_TWO, "asynchronous": True, "store_s": 0.05, "driver_killed_every_s": 2.0},
    ),
    _bug(
        "the furthest operator counts",
        "a start goes by the newest epoch of any operator, and leaves another's gap",
        (_REF, _SECOND, "exactly once", _STUCK),
        planted_jobs.furthest_operator_counts,
        {
            **_TWO,
            "asynchronous": True,
            "zombies": False,
            "indeterminate": False,
            "commit_timeout_s": 20.0,
            "store_faults": 0.15,
            "outage_every_s": 4.0,
            "driver_killed_every_s": 1.5,
        },
    ),
)
