"""State that moves: another parallelism, and subtasks that are placed anew."""

from __future__ import annotations

from random import Random
from typing import Final

from recovery.drill.catalogue.mid_operation_crashes import COMMIT, stopped_at
from recovery.drill.faults.drill_fault import DrillFault
from recovery.drill.faults.stage import CannotStrikeError, Stage
from recovery.drill.faults.waits import until_or_end

__all__ = ["FAULTS"]

_WITHIN_S: Final = 300.0
# A start commits its claim; the record of the first epoch is what is committed next.
_FIRST_RECORD: Final = 2


def _others(stage: Stage) -> list[int]:
    """What the parallelism may be beside what it is."""
    before = stage.drivers.parallelism
    found = [number for number in range(1, stage.subtasks_max + 1) if number != before]
    if not found:
        raise CannotStrikeError("there is one task slot, and each subtask needs one")
    return found


def _another(stage: Stage, rng: Random) -> tuple[int, int]:
    """From the next driver on there is another parallelism: the one before, and that."""
    before, after = stage.drivers.parallelism, rng.choice(_others(stage))
    stage.drivers.rescale(after)
    return before, after


def _rescaled(stage: Stage, rng: Random) -> str:
    _others(stage)
    stage.drivers.kill()
    before, after = _another(stage, rng)
    return f"from {before} to {after} subtasks"


def _crashed(stage: Stage, rng: Random) -> str:
    """The next driver is killed as well: while state moves, or around its first commit."""
    how = rng.choice(["subtasks", "lost", "landed"])
    _others(stage)
    stage.drivers.kill()
    last = stage.committed()
    before, after = _another(stage, rng)
    if how == "subtasks":
        wanted = rng.randint(1, after)
        stage.drivers.start()
        until_or_end(
            stage,
            lambda: stage.drivers.restored() >= wanted or stage.committed() > last,
            "a subtask that has its state back",
            _WITHIN_S,
        )
        where = f"when {stage.drivers.restored()} had their state"
        stage.drivers.kill()
    else:
        stage.drivers.start()
        with stopped_at(stage, COMMIT, landed=how == "landed", nth=_FIRST_RECORD):
            stage.drivers.kill()
        where = f"when the first record was {'there' if how == 'landed' else 'on its way'}"
    stage.drivers.start()
    return f"from {before} to {after} subtasks, and killed {where}"


def _rebalanced(stage: Stage, rng: Random) -> str:
    """As an operator would: an executor dies, another comes, and subtasks are spread by hand."""
    executors = stage.processes.executors()
    if not executors:
        raise CannotStrikeError("this cluster has no executor processes of its own")
    lost = rng.choice(executors)
    stage.processes.kill([lost])
    until_or_end(
        stage,
        lambda: len(set(stage.processes.executors()) - {lost}) >= len(executors),
        "a replacement",
        _WITHIN_S,
    )
    stage.rebalance(len(executors))
    return f"executor {lost} was replaced, and subtasks placed anew"


FAULTS: Final = (
    DrillFault(
        name="rescaled",
        summary="The driver is killed, and the next one is started with another parallelism.",
        promise="Every key goes on with its state in the subtask that has it now; results are "
        "exact.",
        strike=_rescaled,
        weight=2,
    ),
    DrillFault(
        name="rescale-crashed",
        summary="The driver is started with another parallelism, and killed in the first epoch "
        "while subtasks get their state, or around its commit.",
        promise="The next driver goes on from before that epoch or after it, at the new "
        "parallelism; results are exact.",
        strike=_crashed,
        needs=frozenset({"compiler"}),
        weight=2,
    ),
    DrillFault(
        name="rebalanced",
        summary="An executor is killed, and subtasks are placed anew by hand once it is replaced.",
        promise="The query runs on while its subtasks move; results are exact.",
        strike=_rebalanced,
        needs=frozenset({"batches"}),
    ),
)
