"""SIGKILL at a random moment of an epoch: to a driver, its JVM, an executor, a Python worker.

Each strike waits until what it killed is gone, and says what that was. One that found nothing to
kill is not made, and counts for nothing.
"""

from __future__ import annotations

from random import Random
from typing import Any, Final, cast

from recovery.drill.faults.drill_fault import DrillFault
from recovery.drill.faults.stage import CannotStrikeError, Stage
from recovery.drill.faults.waits import until_or_end
from recovery.drill.run.live_stage import LiveStage
from tests.support.faults import Fault

WITHIN_S: Final = 1.5  # an epoch and some, so that every moment of one is hit
_FOUND_WITHIN_S: Final = 120.0
_PARALLELISMS: Final = (1, 3)


def _moment(stage: Stage, rng: Random) -> None:
    stage.pause(rng.uniform(0.0, WITHIN_S))


def _kill(stage: Stage, pids: list[int], what: str) -> str:
    alive = cast(LiveStage, stage).processes
    stage.processes.kill(pids)
    stage.until(lambda: not set(pids) & set(alive.all()), f"the end of {what}", 60.0)
    return f"{what} {', '.join(map(str, pids))}"


def _worker(stage: Stage, rng: Random) -> str:
    _moment(stage, rng)
    found = until_or_end(stage, stage.processes.python_workers, "a Python worker", _FOUND_WITHIN_S)
    return _kill(stage, [rng.choice(found)], "Python worker")


def _executor(stage: Stage, rng: Random) -> str:
    _moment(stage, rng)
    found = until_or_end(stage, stage.processes.executors, "an executor", _FOUND_WITHIN_S)
    return _kill(stage, [rng.choice(found)], "executor")


def _jvm(stage: Stage, rng: Random) -> str:
    """The driver's JVM alone: with `local[n]` it runs the tasks, too."""
    _moment(stage, rng)
    jvms = cast(LiveStage, stage).processes.driver_jvms
    return _kill(stage, until_or_end(stage, jvms, "a driver's JVM", _FOUND_WITHIN_S), "JVM")


def _driver(stage: Stage, rng: Random) -> str:
    _moment(stage, rng)
    return _whole(stage)


def _whole(stage: Stage) -> str:
    live = cast(LiveStage, stage)
    pids = [driver.pid for driver in live.drivers.living()] + live.processes.driver_jvms()
    if not pids:
        raise CannotStrikeError("no driver was running")
    stage.drivers.kill()
    return f"driver {', '.join(map(str, pids))}"


def _rescaled(stage: Stage, rng: Random) -> str:
    _moment(stage, rng)
    killed, before = _whole(stage), stage.drivers.parallelism
    most = min(stage.subtasks_max, max(_PARALLELISMS))
    stage.drivers.rescale(most if before == 1 else 1)
    return f"{killed}, and from {before} to {stage.drivers.parallelism} subtasks"


def _fault(fault: Fault, strike: Any) -> DrillFault:
    return DrillFault(
        name=fault.value,
        summary=f"{fault.sentence} By SIGKILL, at a random moment.",
        promise="Results are exact.",
        strike=strike,
    )


DRIVER: Final = _fault(Fault.DRIVER_KILLED, _driver)
JVM: Final = _fault(Fault.JVM_KILLED, _jvm)
WORKER: Final = _fault(Fault.WORKER_KILLED, _worker)
EXECUTOR: Final = _fault(Fault.EXECUTOR_LOST, _executor)
# The driver is killed, and the next one has another number of subtasks.
RESCALED: Final = _fault(Fault.RESCALED, _rescaled)

ALL: Final = (DRIVER, JVM, EXECUTOR, WORKER, RESCALED)
