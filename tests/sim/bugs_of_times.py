"""Planted bugs of what goes by time, and of what a job begins with; see `bugs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tests.planted.bug import Patches, PlantedBug
from tests.sim import planted_times

__all__ = ["BY_TIME"]

_ONCE, _OUT, _TIMES, _REF, _STUCK = "exactly once", "output", "times", "references", "liveness"
_LEFT_OUT: Final = {
    "listing_lag_s": 0.0,
    **dict.fromkeys(
        ("rescale", "rebalance_every_s", "savepoint_every_s", "flipped_base", "calls_frozen"), 0.0
    ),
    "clock_jumps_every_s": 0.0,
    "keyless": False,
    "second": "",
    "timed": "",
    "initial": False,
    "rows": 80,
    "row_s": 0.0005,
    "arrow": False,
}
_EVENT: Final = {"timed": "event"}
_PROCESSING: Final = {"timed": "processing"}
_INITIAL: Final = {
    "initial": True,
    "zombies": False,
    "second_driver_every_s": 0.0,
    "driver_killed_every_s": 0.3,
    "query_stopped_every_s": 0.5,
}
_RESCALED: Final = {"query_stopped_every_s": 1.0, "rescale": 0.8}


def _bug(
    name: str,
    what: str,
    shows_in: tuple[str, ...],
    patches: Callable[[], Patches],
    world: Mapping[str, Any],
    issue18: str = "",
) -> PlantedBug:
    return PlantedBug(name, what, shows_in, patches, {**_LEFT_OUT, **world}, issue18)


BY_TIME: Final = (
    _bug(
        "timers are lost in a rescale",
        "a child takes over its parents' rows, and of their timers only those in a base",
        (_ONCE,),
        planted_times.timers_lost_in_a_rescale,
        {**_EVENT, **_RESCALED, "base_every_epochs": 12},
    ),
    _bug(
        "what was fired on its way is due again",
        "timers that the epoch before has fired are due while its record is on its way",
        (_ONCE, _OUT),
        planted_times.layers_not_asked,
        {**_EVENT, "asynchronous": True, "store_s": 0.05},
    ),
    _bug(
        "a fired timer stays",
        "a timer is not deleted after its call",
        (_ONCE, _OUT, _TIMES),
        planted_times.fired_stays,
        _PROCESSING,
    ),
    _bug(
        "due by the wall clock",
        "timers fire by what the clock shows, not by the time of the batch",
        (_ONCE, _OUT, _TIMES),
        planted_times.due_by_the_wall_clock,
        _PROCESSING,
    ),
    _bug(
        "due below its time",
        "a timer at the very time of the batch waits for the next one",
        (_ONCE, _OUT, _TIMES),
        planted_times.due_below,
        _PROCESSING,
    ),
    _bug(
        "time never goes back",
        "a batch with an earlier time than the one before is given that one's",
        (_ONCE, _OUT, _TIMES),
        planted_times.time_never_goes_back,
        _PROCESSING,
    ),
    _bug(
        "state expires by the watermark",
        "what has expired is looked for by the event time of the job",
        (_ONCE, _OUT),
        planted_times.expires_by_the_watermark,
        _EVENT,
    ),
    _bug(
        "a look moves the watermark",
        "the next watermark follows from rows that another action saw, whatever was recorded",
        (_TIMES,),
        planted_times.look_moves_the_watermark,
        {
            **_EVENT,
            "indeterminate": True,
            "zombies": False,
            "second_driver_every_s": 0.0,
            "partial": 0.0,
            "looks": 0.5,
            "parallelism": 3,
        },
    ),
    _bug(
        "the watermark of the batch before",
        "a start goes on with the watermark of the last record, not with the one that follows",
        (_TIMES,),
        planted_times.watermark_of_the_batch_before,
        {**_EVENT, "driver_killed_every_s": 2.0, "query_stopped_every_s": 2.0},
    ),
    _bug(
        "late by the watermark in force",
        "rows are late by the watermark of their own batch, not by that of the one before",
        (_TIMES,),
        planted_times.late_by_the_watermark_in_force,
        _EVENT,
    ),
    _bug(
        "the initial state comes in at each epoch",
        "an operator is given its initial state as long as the run lasts that began with it",
        (_ONCE, _OUT),
        planted_times.initial_at_each_epoch,
        {"initial": True},
    ),
    _bug(
        "the initial state comes in at each start",
        "a start that goes on has the initial state written and taken in once more",
        (_ONCE, _OUT),
        planted_times.initial_at_each_start,
        {**_INITIAL, "driver_killed_every_s": 2.0},
    ),
    _bug(
        "the initial state is lost at a repeat",
        "an operator whose first epoch was finished is not given it when that epoch is repeated",
        (_ONCE, _OUT),
        planted_times.initial_lost_at_a_repeat,
        {**_INITIAL, "sink_fails": 0.5},
    ),
    _bug(
        "a start without the initial state is let in",
        "nobody asks for the initial state that the batch which is repeated had taken in",
        (_ONCE, _OUT),
        planted_times.let_in_without_initial,
        {**_INITIAL, "sink_fails": 0.5},
        issue18="5b",
    ),
)
