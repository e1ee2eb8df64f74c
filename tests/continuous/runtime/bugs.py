"""The running job's planted bugs: the rules, and what of them is seen from outside.

Wrong ``rows``, or a job that cannot go on (``error``, ``stuck``).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.continuous.runtime import planted
from tests.continuous.runtime.trial import Result, TrialConfig, lived
from tests.planted.bug import Patches, PlantedBug, Simulation, adjust, by_name
from tests.planted.bug import planted as put_in

__all__ = ["BUGS", "SIMULATION"]


def _several(
    name: str, what: str, patches: Callable[[], Patches], shows_in: tuple[str, ...] = ("rows",)
) -> PlantedBug:
    """Of several checkpoints that are under way at once."""
    return PlantedBug(name, what, shows_in, patches, {"concurrent": 3})


def _bug(
    name: str, what: str, patches: Callable[[], Patches], shows_in: tuple[str, ...] = ("rows",)
) -> PlantedBug:
    return PlantedBug(name, what, shows_in, patches)


BUGS: Final = by_name(
    _bug(
        "acked before durable",
        "a subtask acks while its slice is still on its way to the store",
        planted.acked_before_durable,
        ("error",),
    ),
    _bug(
        "nothing is blocked",
        "rows behind an early barrier are in an exactly-once snapshot",
        planted.nothing_is_blocked,
    ),
    _bug(
        "aborted layers are let go",
        "what was frozen for an attempt that was given up is in no later one",
        planted.aborted_layers_are_let_go,
        ("rows", "error"),
    ),
    _bug(
        "aborted is confirmed",
        "an attempt that was given up counts as complete in its subtask",
        planted.confirmed_is_the_newest,
        ("rows", "error"),
    ),
    _bug(
        "a barrier overtakes rows",
        "rows that were gathered before a barrier go after it",
        planted.barrier_overtakes_rows,
    ),
    _bug(
        "offsets of the next batch",
        "a source's position is taken after a batch that goes behind the barrier",
        planted.offsets_of_the_next_batch,
    ),
    _bug(
        "positions are lost", "a restored split is read from its start", planted.positions_are_lost
    ),
    _bug(
        "restored splits are lost",
        "splits that were being read are not handed out again",
        planted.restored_splits_are_lost,
    ),
    _bug(
        "a pending split is lost",
        "a split that nobody had is not restored",
        planted.what_nobody_had_is_lost,
    ),
    _bug(
        "handed out on both sides",
        "a split is in the assigner's part of a checkpoint and in a subtask's",
        planted.handed_out_on_both_sides,
        ("rows", "error"),
    ),
    _bug(
        "cut when it is written",
        "splits that go out between a barrier and its record are in no part",
        planted.cut_when_it_is_written,
    ),
    _bug(
        "parts of two attempts",
        "late parts of an attempt that was given up are taken for the next one's",
        planted.parts_of_two_attempts,
        ("rows", "error", "stuck"),
    ),
    _bug(
        "a source of the attempt before",
        "one part of a checkpoint is of the attempt before",
        planted.a_source_of_the_attempt_before,
        ("rows", "error"),
    ),
    _bug(
        "an epoch of one record",
        "an epoch counts when the first of its vertices has its record",
        planted.an_epoch_of_one_record,
        ("rows", "error"),
    ),
    _bug(
        "prepared is not repeated",
        "output that an aborted attempt had prepared is in no later one",
        planted.prepared_is_not_repeated,
    ),
    _bug(
        "aborted output is forgotten",
        "output of an aborted attempt is taken for committed",
        planted.aborted_output_is_forgotten,
    ),
    _bug(
        "prepared one late",
        "a checkpoint holds what the sink prepared for the one before",
        planted.prepared_one_late,
    ),
    _bug(
        "swept before the commit",
        "staged files go before those of the restored checkpoint are committed",
        planted.swept_before_the_commit,
        ("error",),
    ),
    _bug(
        "committed before the record",
        "output shows before its checkpoint is durable",
        planted.committed_before_the_record,
    ),
    _bug(
        "not committed after a restore",
        "what the restored checkpoint had prepared is left, and swept",
        planted.not_committed_after_a_restore,
    ),
    # several checkpoints under way at once
    _several(
        "the turn is not waited for",
        "a part is made while the attempt before it may be complete or given up",
        planted.the_turn_is_not_waited_for,
        ("rows", "error", "stuck"),
    ),
    _several(
        "confirmed with those behind",
        "what was frozen for a later attempt is taken for durable with an earlier one",
        planted.confirmed_with_those_behind,
        ("rows", "error"),
    ),
    _several(
        "output of those behind is forgotten",
        "what was prepared for a later attempt is taken for committed with an earlier one",
        planted.output_of_those_behind_is_forgotten,
    ),
    _several(
        "held back for the oldest cut",
        "a split is handed out after a cut that its subtask has not passed",
        planted.held_back_for_the_oldest_cut,
        ("rows", "error"),
    ),
)

_QUICK = ("a barrier overtakes rows", "handed out on both sides", "prepared is not repeated")


def _simulate(seed: int, bug: PlantedBug | None) -> Result:
    config = TrialConfig()
    adjust(config, bug)
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        return lived(Path(folder), seed, config, lambda: put_in(bug))


SIMULATION: Final = Simulation(
    "trial",
    BUGS,
    _simulate,
    seeds=30,  # one or two show with every fourth only
    clean_seeds_max=3,  # each takes seconds of real time
    minutes=frozenset(name for name, bug in BUGS.items() if not bug.world and name not in _QUICK),
)
