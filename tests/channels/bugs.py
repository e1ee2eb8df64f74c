"""The channels' planted bugs: the rules, and the worlds in which breaking them shows.

Most are put into the product's machines; some into the loop and the driver around them, for rules
that those must keep.
"""

from __future__ import annotations

from typing import Final

from tests.channels import planted
from tests.channels.world import Result, simulate
from tests.planted.bug import PlantedBug, Simulation, by_name

__all__ = ["BUGS", "SIMULATION"]

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

BUGS: Final = by_name(
    PlantedBug(
        "nothing is blocked",
        "rows behind an early barrier are in an exactly-once snapshot",
        (_CUT,),
        planted.nothing_is_blocked,
        _EXACT,
    ),
    PlantedBug(
        "the first barrier triggers",
        "the snapshot does not wait for the other channels",
        (_CUT,),
        planted.first_barrier_triggers,
        _EXACT,
    ),
    PlantedBug(
        "an abort unblocks nothing",
        "the channels of an attempt that was given up stay blocked",
        (_STUCK, _ODD),
        planted.abort_unblocks_nothing,
        _ATTEMPTS_FAIL,
    ),
    PlantedBug(
        "an older attempt stays",
        "an attempt whose barrier will not come is waited for beside a newer one",
        (_CUT, _STUCK),
        planted.older_attempt_stays,
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
    PlantedBug(
        "the coordinator's word is not heeded",
        "a subtask whose channels have all ended waits for a barrier",
        (_STUCK,),
        planted.word_is_not_heeded,
    ),
    PlantedBug(
        "overtaken rows are not kept",
        "what lies ahead of a barrier is not in the unaligned snapshot",
        (_CUT,),
        planted.overtaken_rows_are_not_kept,
        _UNALIGNED,
    ),
    PlantedBug(
        "rows before a barrier on its way are not kept",
        "what is taken out after an unaligned snapshot, before the barrier, is not in it",
        (_CUT,),
        planted.rows_before_a_barrier_on_its_way_are_not_kept,
        _UNALIGNED,
    ),
    PlantedBug(
        "acked before all is captured",
        "an unaligned part is whole although a barrier has not arrived",
        (_CUT,),
        planted.acked_before_all_is_captured,
        _UNALIGNED,
    ),
    PlantedBug(
        "overtaken rows are kept twice",
        "rows that were copied ahead of a barrier are kept again when they are taken out",
        (_CUT,),
        planted.overtaken_rows_are_kept_twice,
        _UNALIGNED,
    ),
    PlantedBug(
        "only the newest word counts",
        "of several attempts that were told, a subtask at its end takes the newest alone",
        (_STUCK,),
        planted.only_the_newest_word_counts,
        {**_EXACT, "max_concurrent": 3, "min_pause_s": 0.0, "max_share": None, "slow": 0.5},
    ),
    PlantedBug(
        "a late ack counts",
        "a part of another attempt is taken for this one's",
        (_CUT,),
        planted.late_ack_counts,
        _QUICKLY,
    ),
    PlantedBug(
        "an ack counts as often as it comes",
        "an ack that comes twice stands for two subtasks",
        (_CUT, _ODD, _STUCK),
        planted.ack_counts_as_often_as_it_comes,
        _EXACT,
    ),
    PlantedBug(
        "an aborted attempt keeps its epoch",
        "epochs have gaps",
        (_NUMBERS,),
        planted.aborted_attempt_keeps_its_epoch,
        _ATTEMPTS_FAIL,
    ),
    PlantedBug(
        "numbers begin anew",
        "after a restart attempts are numbered from 1",
        (_NUMBERS,),
        planted.numbers_begin_anew,
        _FAILS,
    ),
    PlantedBug(
        "newer attempts stay",
        "an attempt outlives the one that it builds on",
        (_CUT, _NUMBERS),
        planted.newer_attempts_stay,
        _MANY_AT_ONCE,
    ),
    PlantedBug(
        "committed as they are acked",
        "a newer attempt is committed before an older one",
        (_NUMBERS, _CUT),
        planted.committed_as_they_are_acked,
        _MANY_AT_ONCE,
    ),
    PlantedBug(
        "a record being written is given up",
        "an attempt is given up although its record may land",
        (_NUMBERS, _CUT, _ODD),
        planted.record_being_written_is_given_up,
        {**_QUICKLY, "write_s": 0.1},
    ),
    PlantedBug(
        "an aborted attempt lets go",
        "nobody waits for a subtask any more that was at its end in an attempt given up",
        (_CUT, _ODD),
        planted.an_aborted_attempt_lets_go,
        {**_ATTEMPTS_FAIL, "may_leave": True},
    ),
    PlantedBug(
        "rows in flight are rescaled",
        "an unaligned checkpoint is restored at another parallelism",
        (_OUT, _CUT),
        planted.rows_in_flight_are_rescaled,
        {**_UNALIGNED, **_FAILS, "rescale": 0.8},
    ),
    PlantedBug(
        "the largest watermark",
        "the watermark is the fastest channel's",
        (_ORDER,),
        planted.largest_watermark,
        {**_EXACT, "idle": 0.0},
    ),
    PlantedBug(
        "an ended channel holds the watermark",
        "the end of a channel does not count as the end of time",
        (_ORDER,),
        planted.ended_channel_holds_the_watermark,
    ),
    PlantedBug(
        "overtaken rows are taken out",
        "rows go into the snapshot in place of being delivered",
        (_ORDER, _CUT),
        planted.overtaken_rows_are_taken_out,
        _UNALIGNED,
    ),
    PlantedBug(
        "rows in flight are not put back",
        "a restore forgets what the barrier had overtaken",
        (_ORDER, _OUT, _CUT),
        planted.rows_in_flight_are_not_put_back,
        {**_UNALIGNED, **_FAILS, "rescale": 0.0},
    ),
    PlantedBug(
        "committed at the barrier",
        "output shows before its checkpoint is complete",
        (_OUT,),
        planted.committed_at_the_barrier,
        _FAILS,
    ),
    PlantedBug(
        "notified before the sinks are committed",
        "sinks forget what they prepared before it is committed",
        (_OUT,),
        planted.notified_before_the_sinks_are_committed,
        {**_FAILS, "driver_dies": 0.003, "fails": 0.0, "interval_s": 0.01},
    ),
    PlantedBug(
        "aborted output is dropped",
        "what a sink prepared for an attempt given up is not handed on to the next",
        (_OUT,),
        planted.aborted_output_is_dropped,
        _ATTEMPTS_FAIL,
    ),
    PlantedBug(
        "an aborted delta is dropped",
        "what changed up to an attempt given up is not in the next one's delta",
        (_CUT,),
        planted.aborted_delta_is_dropped,
        _ATTEMPTS_FAIL,
    ),
    PlantedBug(
        "sinks are not committed again",
        "a restore does not commit what its record names",
        (_OUT,),
        planted.sinks_are_not_committed_again,
        {**_FAILS, "driver_dies": 0.01},
    ),
    PlantedBug(
        "the end is said again",
        "an operator restored at its end says its last rows once more",
        (_OUT, _CUT),
        planted.the_end_is_said_again,
        {**_FAILS, "fails": 0.01},
    ),
)


def _simulate(seed: int, bug: PlantedBug | None) -> Result:
    return simulate(seed, bug=bug)


SIMULATION: Final = Simulation("channels", BUGS, _simulate, seeds=48)
