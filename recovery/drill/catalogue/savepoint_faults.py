"""Savepoints of a job that runs: taken, or cut by the driver's death."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from recovery.drill.catalogue.mid_operation_crashes import UPLOADS, land
from recovery.drill.catalogue.store_faults import planned
from recovery.drill.driver.driver_messages import Taken
from recovery.drill.faults.drill_fault import DrillFault
from recovery.drill.faults.shim import shim_of
from recovery.drill.faults.stage import CannotStrikeError, Stage
from recovery.drill.proxy.fault_plan import Facts, Fault
from recovery.drill.proxy.s3_requests import WRITES, Verb
from statebackend.errors import DrillError

__all__ = ["FAULTS", "HoldBelow"]

_WITHIN_S: Final = 300.0
# All but the records are written by name, whatever is there. There is more than this: the state's
# objects, then three files of Spark's checkpoint location at least, and savepoint.json at last.
_NTH_MAX: Final = 4
_COPIES: Final = WRITES - {Verb.PUT_IF}


class HoldBelow:
    """Holds the writes below a folder, but for those of records, from the nth on."""

    def __init__(self, part: str, nth: int) -> None:
        self._part, self._left = part, nth
        self._lock = threading.Lock()

    def decide(self, facts: Facts, *, seed: int) -> Fault | None:
        """To hold it, or nothing."""
        if facts.verb not in _COPIES or self._part not in f"/{facts.key}":
            return None
        with self._lock:
            self._left -= 1
            return Fault.hold() if self._left < 1 else None


def _answered(stage: Stage) -> Taken | None:
    """What the driver says to the last that it was asked.

    Raises:
        CannotStrikeError: such a job can have no savepoint. DrillError: an error.
    """
    taken = stage.savepoints.answer()
    if taken is not None and taken.error:
        raise DrillError(
            f"The job gave no savepoint: {taken.error}", todo=f"Look at the logs in {stage.root}."
        )
    if taken is not None and not taken.uri:
        raise CannotStrikeError(taken.cannot)
    return taken


def _taken(stage: Stage, rng: Random) -> str:
    """The job runs on meanwhile; the drill's end looks at what was taken."""
    drivers = stage.drivers.started()
    stage.savepoints.ask()
    taken: Taken = stage.until(lambda: _answered(stage), "a savepoint", _WITHIN_S)
    if stage.drivers.started() != drivers:
        raise DrillError(
            "The driver ended while it took a savepoint.", todo=f"Look at the logs in {stage.root}."
        )
    if taken.cannot:
        raise CannotStrikeError(taken.cannot)
    stage.savepoints.taken.append(taken)
    return f"of epoch {taken.epoch}"


@contextlib.contextmanager
def _held_below(stage: Stage, uri: str, *, landed: bool, nth: int) -> Iterator[list[int]]:
    """A savepoint that goes to a folder is stopped at the nth copy while the block runs.

    Returns:
        the numbers of the held requests; none on files.
    """
    path = unquote(urlsplit(uri).path)
    if stage.proxy is None:
        shim = shim_of(stage)
        with shim.calm_afterwards():
            below = f"{Path(path).resolve()}/"
            shim.hold_at("rename", below, when="after" if landed else "before", nth=nth)
            stage.savepoints.ask(uri)
            _until_held(stage, shim.held)
            yield []
        return
    proxy = stage.proxy
    before = set(proxy.held())

    def held() -> list[int]:
        return [number for number in proxy.held() if number not in before]

    numbers: list[int] = []
    with planned(proxy, HoldBelow(f"{path}/", nth)):
        stage.savepoints.ask(uri)
        _until_held(stage, held)
        yield numbers
        numbers += held()


def _until_held(stage: Stage, held: Callable[[], Any]) -> None:
    def met() -> bool:
        if held():
            return True
        if _answered(stage) is not None:
            raise DrillError(
                "A savepoint was finished that was to be stopped.",
                todo=f"Look at the logs in {stage.root}.",
            )
        return False

    stage.until(met, "a savepoint in the middle", _WITHIN_S)


def _crashed(stage: Stage, rng: Random) -> str:
    """The driver is killed when something of the savepoint is there, and something not."""
    landed = rng.random() < 0.5
    nth = rng.randint(1, _NTH_MAX)
    uri = stage.savepoints.place()
    try:
        with _held_below(stage, uri, landed=landed, nth=nth) as held:
            stage.drivers.kill()
    finally:
        stage.savepoints.withdraw()
    if landed:
        land(stage, held)
    stage.drivers.start()
    wrong = stage.savepoints.look("remove", uri)
    if wrong:
        raise DrillError(
            f"Of the savepoint {uri}, which was cut: {'; '.join(wrong)}.",
            todo=f"Look at the drill's folder {stage.root}.",
        )
    return f"at copy {nth}, which was {'done' if landed else 'not done'}"


FAULTS: Final = (
    DrillFault(
        name="savepoint-taken",
        summary="A savepoint is taken while the job runs, and when it has ended a clone begins "
        "with it.",
        promise="The job runs on; the savepoint is whole, and what the job put out up to it and "
        "the clone after it is exact.",
        strike=_taken,
        needs=frozenset({"batches"}),
    ),
    DrillFault(
        name="savepoint-crashed",
        summary="The driver is killed while it copies objects into a savepoint.",
        promise="Results are exact; what is left of the savepoint is listed as not finished, and "
        "can be deleted.",
        strike=_crashed,
        needs=frozenset({"batches", "compiler"}),
        settings=UPLOADS,
    ),
)
