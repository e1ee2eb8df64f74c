"""Planted bugs: each breaks one rule, and a checker must show it.

Most are put into the product's machines; some into the loop and the driver around them, for rules
that those must keep. ``world`` says what kind of world a bug needs to show.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.channels.plan import Config

__all__ = ["MUTATIONS", "Mutation", "adjust", "applied"]


@dataclass(frozen=True)
class Mutation:
    """One planted bug.

    Attributes:
        what: the rule, as it is broken. shows_in: the checkers that may find it.
        patches: what is put where, by its name in `tests.channels.planted`.
        world: fields of the config that it needs.
    """

    what: str
    shows_in: tuple[str, ...]
    patches: str
    world: Mapping[str, Any] = field(default_factory=dict)


_EXACT = {"mode": "exactly_once"}
_UNALIGNED = {**_EXACT, "alignment_timeout_ms": 1, "slow": 0.5, "capacity": 4, "interval_s": 0.03}
_ATTEMPTS_FAIL = {**_EXACT, "persist_fails": 0.1, "timeout_s": 0.1, "tolerable": 100}
_QUICKLY = {**_ATTEMPTS_FAIL, "timeout_s": 0.05}
_MANY = {**_ATTEMPTS_FAIL, "max_concurrent": 3, "min_pause_s": 0.0, "max_share": None}
_MANY_AT_ONCE = {**_MANY, "interval_s": 0.01}
_FAILS = {**_EXACT, "fails": 0.005, "driver_dies": 0.002, "interval_s": 0.03, "patient": True}

_CUT, _OUT, _ORDER, _NUMBERS, _STUCK, _ODD = (
    "cut",
    "output",
    "order",
    "numbers",
    "liveness",
    "unexpected",
)

MUTATIONS: dict[str, Mutation] = {
    "nothing is blocked": Mutation(
        "rows behind an early barrier are in an exactly-once snapshot",
        (_CUT,),
        "nothing_is_blocked",
        _EXACT,
    ),
    "the first barrier triggers": Mutation(
        "the snapshot does not wait for the other channels",
        (_CUT,),
        "first_barrier_triggers",
        _EXACT,
    ),
    "an abort unblocks nothing": Mutation(
        "the channels of an attempt that was given up stay blocked",
        (_STUCK, _ODD),
        "abort_unblocks_nothing",
        _ATTEMPTS_FAIL,
    ),
    "an older attempt stays": Mutation(
        "an attempt whose barrier will not come is waited for beside a newer one",
        (_CUT, _STUCK),
        "older_attempt_stays",
        {
            **_QUICKLY,
            "messages_lost": 0.3,
            "alignment_timeout_ms": None,
            "persist_fails": 0.0,
            "fails": 0.0,
            "driver_dies": 0.0,
            "capacity": 1,
            "interval_s": 0.01,
        },
    ),
    "the coordinator's word is not heeded": Mutation(
        "a subtask whose channels have all ended waits for a barrier",
        (_STUCK,),
        "word_is_not_heeded",
    ),
    "overtaken rows are not kept": Mutation(
        "what lies ahead of a barrier is not in the unaligned snapshot",
        (_CUT,),
        "overtaken_rows_are_not_kept",
        _UNALIGNED,
    ),
    "rows before a barrier on its way are not kept": Mutation(
        "what is taken out after an unaligned snapshot, before the barrier, is not in it",
        (_CUT,),
        "rows_before_a_barrier_on_its_way_are_not_kept",
        _UNALIGNED,
    ),
    "acked before all is captured": Mutation(
        "an unaligned part is whole although a barrier has not arrived",
        (_CUT,),
        "acked_before_all_is_captured",
        _UNALIGNED,
    ),
    "overtaken rows are kept twice": Mutation(
        "rows that were copied ahead of a barrier are kept again when they are taken out",
        (_CUT,),
        "overtaken_rows_are_kept_twice",
        _UNALIGNED,
    ),
    "only the newest word counts": Mutation(
        "of several attempts that were told, a subtask at its end takes the newest alone",
        (_STUCK,),
        "only_the_newest_word_counts",
        {**_EXACT, "max_concurrent": 3, "min_pause_s": 0.0, "max_share": None, "slow": 0.5},
    ),
    "a late ack counts": Mutation(
        "a part of another attempt is taken for this one's", (_CUT,), "late_ack_counts", _QUICKLY
    ),
    "an ack counts as often as it comes": Mutation(
        "an ack that comes twice stands for two subtasks",
        (_CUT, _ODD, _STUCK),
        "ack_counts_as_often_as_it_comes",
        _EXACT,
    ),
    "an aborted attempt keeps its epoch": Mutation(
        "epochs have gaps", (_NUMBERS,), "aborted_attempt_keeps_its_epoch", _ATTEMPTS_FAIL
    ),
    "numbers begin anew": Mutation(
        "after a restart attempts are numbered from 1", (_NUMBERS,), "numbers_begin_anew", _FAILS
    ),
    "newer attempts stay": Mutation(
        "an attempt outlives the one that it builds on",
        (_CUT, _NUMBERS),
        "newer_attempts_stay",
        _MANY_AT_ONCE,
    ),
    "committed as they are acked": Mutation(
        "a newer attempt is committed before an older one",
        (_NUMBERS, _CUT),
        "committed_as_they_are_acked",
        _MANY_AT_ONCE,
    ),
    "a record being written is given up": Mutation(
        "an attempt is given up although its record may land",
        (_NUMBERS, _CUT, _ODD),
        "record_being_written_is_given_up",
        {**_QUICKLY, "write_s": 0.1},
    ),
    "an aborted attempt lets go": Mutation(
        "nobody waits for a subtask any more that was at its end in an attempt given up",
        (_CUT, _ODD),
        "an_aborted_attempt_lets_go",
        {**_ATTEMPTS_FAIL, "may_leave": True},
    ),
    "rows in flight are rescaled": Mutation(
        "an unaligned checkpoint is restored at another parallelism",
        (_OUT, _CUT),
        "rows_in_flight_are_rescaled",
        {**_UNALIGNED, **_FAILS, "rescale": 0.8},
    ),
    "the largest watermark": Mutation(
        "the watermark is the fastest channel's",
        (_ORDER,),
        "largest_watermark",
        {**_EXACT, "idle": 0.0},
    ),
    "an ended channel holds the watermark": Mutation(
        "the end of a channel does not count as the end of time",
        (_ORDER,),
        "ended_channel_holds_the_watermark",
    ),
    "overtaken rows are taken out": Mutation(
        "rows go into the snapshot in place of being delivered",
        (_ORDER, _CUT),
        "overtaken_rows_are_taken_out",
        _UNALIGNED,
    ),
    "rows in flight are not put back": Mutation(
        "a restore forgets what the barrier had overtaken",
        (_ORDER, _OUT, _CUT),
        "rows_in_flight_are_not_put_back",
        {**_UNALIGNED, **_FAILS, "rescale": 0.0},
    ),
    "committed at the barrier": Mutation(
        "output shows before its checkpoint is complete",
        (_OUT,),
        "committed_at_the_barrier",
        _FAILS,
    ),
    "notified before the sinks are committed": Mutation(
        "sinks forget what they prepared before it is committed",
        (_OUT,),
        "notified_before_the_sinks_are_committed",
        {**_FAILS, "driver_dies": 0.003, "fails": 0.0, "interval_s": 0.01},
    ),
    "aborted output is dropped": Mutation(
        "what a sink prepared for an attempt given up is not handed on to the next",
        (_OUT,),
        "aborted_output_is_dropped",
        _ATTEMPTS_FAIL,
    ),
    "an aborted delta is dropped": Mutation(
        "what changed up to an attempt given up is not in the next one's delta",
        (_CUT,),
        "aborted_delta_is_dropped",
        _ATTEMPTS_FAIL,
    ),
    "sinks are not committed again": Mutation(
        "a restore does not commit what its record names",
        (_OUT,),
        "sinks_are_not_committed_again",
        {**_FAILS, "driver_dies": 0.01},
    ),
    "the end is said again": Mutation(
        "an operator restored at its end says its last rows once more",
        (_OUT, _CUT),
        "the_end_is_said_again",
        {**_FAILS, "fails": 0.01},
    ),
}


def adjust(name: str, config: Config) -> None:
    """Make the world one in which the bug can show."""
    if name:
        for key, value in MUTATIONS[name].world.items():
            setattr(config, key, value)


@contextlib.contextmanager
def applied(name: str) -> Iterator[None]:
    """Have the bug in the code for a while."""
    if not name:
        yield
        return
    from tests.channels import planted  # it changes what imports this module

    make: Callable[[], planted.Patches] = getattr(planted, MUTATIONS[name].patches)
    missing = object()
    undo = []
    try:
        for owner, attribute, mutant in make():
            undo.append((owner, attribute, vars(owner).get(attribute, missing)))
            setattr(owner, attribute, mutant)
        yield
    finally:
        for owner, attribute, before in undo:
            if before is missing:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, before)
