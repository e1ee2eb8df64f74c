"""Processes that die, freeze, or are there twice."""

from __future__ import annotations

import re
import shutil
from functools import partial
from random import Random
from typing import Final

import msgspec

from recovery.drill.cluster.live_processes import parent_of
from recovery.drill.driver.driver_messages import Event
from recovery.drill.faults.drill_fault import DrillFault
from recovery.drill.faults.stage import CannotStrikeError, Stage
from recovery.drill.faults.waits import until_met, until_or_end

__all__ = ["FAULTS"]

_FOUND_WITHIN_S: Final = 120.0
_KILLED_WITHIN_S: Final = 3.0  # spark.python.task.killTimeout, and a second
_TWIN_TRIES: Final = 3
_TWIN_WITHIN_S: Final = 60.0
_NEXT_EPOCH_S: Final = 600.0
# The first is waited for; after the second whoever waits has given it up, if it ever does.
_WORKER_FROZEN_S: Final = (4.0, 25.0)
_ERROR_CHARACTERS_MAX: Final = 200
_CODE: Final = re.compile(r"\[(SB\d{4})\]")
# How soon a driver gives a silent executor up; Spark's own default is two minutes.
_QUICK_TO_NOTICE: Final = {
    "spark.network.timeout": "30s",
    "spark.network.timeoutInterval": "1s",
    "spark.executor.heartbeatInterval": "2s",
}


def _python_workers(stage: Stage) -> list[int]:
    found: list[int] = until_or_end(
        stage, stage.processes.python_workers, "a Python worker", _FOUND_WITHIN_S
    )
    return found


def _executors(stage: Stage, host: str | None = None) -> list[int]:
    if not _has_executors(stage):
        raise CannotStrikeError("this cluster has no executor processes of its own")
    where = f" on {host}" if host else ""
    found: list[int] = until_or_end(
        stage, lambda: stage.processes.executors(host), f"an executor{where}", _FOUND_WITHIN_S
    )
    return found


def _has_executors(stage: Stage) -> bool:
    # A driver that just starts has none yet; `local[n]` has Python workers and never an executor.
    return bool(stage.processes.executors()) or not stage.processes.python_workers()


def _kill_worker(stage: Stage, rng: Random) -> str:
    pid = rng.choice(_python_workers(stage))
    stage.processes.kill([pid])
    return f"Python worker {pid}"


def _freeze_worker(stage: Stage, rng: Random) -> str:
    lasts_s = rng.choice(_WORKER_FROZEN_S)
    pid = rng.choice(_python_workers(stage))
    stage.processes.freeze([pid])
    try:
        stage.pause(lasts_s)
    finally:
        stage.processes.thaw([pid])
    return f"Python worker {pid} for {lasts_s:g} s"


def _kill_executor(stage: Stage, rng: Random) -> str:
    pid = rng.choice(_executors(stage))
    stage.processes.kill([pid])
    return f"executor {pid}"


def _lose_host(stage: Stage, rng: Random) -> str:
    host = rng.choice(list(stage.hosts))
    doomed = _executors(stage, host.name) + stage.processes.python_workers(host.name)
    stage.processes.kill(doomed)
    stage.until(
        lambda: not set(doomed) & set(stage.processes.of_host(host.name)), "the host's processes"
    )
    shutil.rmtree(host.local_dir, ignore_errors=True)
    return f"host {host.name}: {len(doomed)} processes and {host.local_dir}"


def _kill_driver(stage: Stage, rng: Random) -> str:
    stage.drivers.kill()
    return "the driver and its JVM"


def _freeze_executor(stage: Stage, rng: Random) -> str:
    """Until others have done the work of an epoch or two without it."""
    executor = rng.choice(_executors(stage))
    frozen = [executor, *_workers_of(stage, executor)]
    committed = stage.committed()
    stage.processes.freeze(frozen)
    try:
        until_or_end(
            stage,
            lambda: stage.committed() >= committed + 2,
            f"epoch {committed + 2} without a frozen executor",
            _NEXT_EPOCH_S,
        )
    finally:
        stage.processes.thaw(frozen)
    return f"executor {executor} with {len(frozen) - 1} Python processes"


def _workers_of(stage: Stage, executor: int) -> list[int]:
    workers = stage.processes.python_workers()
    return [pid for pid in workers if parent_of(parent_of(pid)) == executor]


def _with_workers(stage: Stage, rng: Random) -> tuple[int, list[int]]:
    """An executor that has Python workers, and these."""

    def found() -> list[tuple[int, list[int]]]:
        return [(e, of_it) for e in stage.processes.executors() if (of_it := _workers_of(stage, e))]

    _executors(stage)  # refuses where there never are any
    chosen: tuple[int, list[int]] = rng.choice(
        until_or_end(stage, found, "an executor's Python workers", _FOUND_WITHIN_S)
    )
    return chosen


def _twin(stage: Stage, rng: Random) -> str:
    """The Python workers of one executor freeze; Spark starts their tasks elsewhere, too.

    Spark kills a worker whose task has lost against its twin: so it is seen whether one had a task.
    It starts no twin on a host that has the task already, so there must be two.
    """
    for _ in range(_TWIN_TRIES):
        executor, frozen = _with_workers(stage, rng)
        wanted = stage.committed() + 2
        stage.processes.freeze(frozen)
        try:
            until_met(
                stage,
                partial(_has_come_to, stage, wanted),
                "an epoch without the frozen workers (Spark started no twins)",
                _TWIN_WITHIN_S,
            )
            stage.pause(_KILLED_WITHIN_S)
            lost = set(frozen) - set(stage.processes.python_workers())
        finally:
            stage.processes.thaw(frozen)
        if lost:
            return f"{len(lost)} Python workers of executor {executor}"
    raise CannotStrikeError("Spark gave no task to any of the frozen workers")


def _has_come_to(stage: Stage, epoch: int) -> bool:
    return stage.committed() >= epoch


def _rival(stage: Stage, rng: Random) -> str:
    """Until one of the two has given up: the first at its next commit, or the second before."""
    if len(stage.hosts) > 1:
        raise CannotStrikeError(
            "the first driver's executors have all of the workers' cores; with local-cluster each "
            "driver brings its own"
        )
    known = _failures(stage)
    stage.drivers.start_another()
    second = max(int(log.stem) for log in (stage.root / "drivers").glob("*.log"))
    until_or_end(
        stage, lambda: stage.drivers.running() < 2, "one of two drivers to end", _NEXT_EPOCH_S
    )
    ended = {n: error for n, error in _failures(stage).items() if n not in known}
    how = [
        f"the {'second was refused' if number == second else 'first was overtaken'}: {error}"
        for number, error in sorted(ended.items())
    ]
    return "; ".join(how) or "one of two drivers ended without an error"


def _failures(stage: Stage) -> dict[int, str]:
    """What drivers failed with, by their numbers: a code of ours, else a first line."""
    found = {}
    for path in (stage.root / "drivers").glob("*.events"):
        data = path.read_bytes()
        for line in data[: data.rfind(b"\n") + 1].splitlines():  # one may be written right now
            event = msgspec.json.decode(line, type=Event)
            if event.kind == "failed":
                # Spark's error begins with its own words, so ours may be in the log only.
                log = path.with_suffix(".log").read_text(errors="replace")
                codes = _CODE.findall(event.error) or _CODE.findall(log)
                first_line = event.error.partition("\n")[0][:_ERROR_CHARACTERS_MAX]
                found[int(path.stem)] = codes[-1] if codes else first_line
    return found


FAULTS: Final = (
    DrillFault(
        name="worker-killed",
        summary="A Python process that runs tasks gets SIGKILL.",
        promise="Its task runs again; nothing is lost or counted twice.",
        strike=_kill_worker,
        weight=3,
    ),
    DrillFault(
        name="worker-frozen",
        summary="A Python process that runs tasks gets SIGSTOP, and SIGCONT some seconds later.",
        promise="Spark waits for it, or gives it up, and then nothing that it still does counts; "
        "results are exact.",
        strike=_freeze_worker,
    ),
    DrillFault(
        name="executor-killed",
        summary="An executor's JVM gets SIGKILL.",
        promise="Its subtasks go on from the local copies of their host.",
        strike=_kill_executor,
        weight=3,
    ),
    DrillFault(
        name="host-lost",
        summary="All executors of a host get SIGKILL, and its local copies are gone.",
        promise="Its subtasks restore from the durable copies.",
        strike=_lose_host,
        weight=2,
    ),
    DrillFault(
        name="driver-killed",
        summary="The driver and its JVM get SIGKILL; another one is started.",
        promise="The next driver takes the job over where it stood.",
        strike=_kill_driver,
        weight=3,
    ),
    DrillFault(
        name="executor-frozen",
        summary="An executor with its Python processes gets SIGSTOP, and SIGCONT after others have "
        "taken over.",
        promise="It is given up, and what it writes once it thaws counts for nothing.",
        strike=_freeze_executor,
        conf=_QUICK_TO_NOTICE,
        settings={"lease_timeout_s": 1.0},
    ),
    DrillFault(
        name="speculative-twin",
        summary="One executor's Python processes freeze; Spark runs their tasks a second time.",
        promise="Of two attempts one counts, whichever ends first.",
        strike=_twin,
        conf={
            "spark.speculation": "true",
            "spark.speculation.multiplier": "1.5",
            "spark.speculation.quantile": "0.25",
            "spark.speculation.interval": "200ms",
            "spark.speculation.minTaskRuntime": "1s",
        },
        settings={"lease_timeout_s": 1.0},
        needs=frozenset({"batches", "two-hosts"}),
    ),
    DrillFault(
        name="two-drivers",
        summary="A second driver is started on the same job, checkpoint and sink.",
        promise="One of them goes on; the other's next commit is refused.",
        strike=_rival,
    ),
)
