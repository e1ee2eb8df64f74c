"""Processes that are killed in the middle of a commit, an upload, a clean-up or a rewind.

They are stopped there first: a request to S3 is held by the proxy, a call to a file system by the
preloaded library. What is held is killed, and may still land afterwards.
"""

from __future__ import annotations

import contextlib
import random as random_numbers
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from recovery.drill.catalogue.store_faults import planned
from recovery.drill.faults.drill_fault import DrillFault
from recovery.drill.faults.shim import Call, Shim, shim_of
from recovery.drill.faults.stage import CannotStrikeError, Stage
from recovery.drill.faults.waits import until_or_end
from recovery.drill.proxy.fault_plan import Facts, Fault
from recovery.drill.proxy.s3_requests import WRITES, Verb

__all__ = ["CLEAN_UP", "COMMIT", "FAULTS", "UPLOAD", "UPLOADS", "Place", "land", "stopped_at"]

_LIMIT_S: Final = 240.0
_STILL_S: Final = 3.0
_REWINDS_TRIED: Final = 3
_LANDS_S: Final = 0.3

# State that is uploaded apart, as files, every second epoch, however small it is.
UPLOADS: Final[Mapping[str, Any]] = {
    "inline_limit_bytes": 0,
    "base_every_epochs": 2,
    "base_apart_every_epochs": 2,
    "base_apart_min_bytes": 0,
    "base_apart_ratio": 0.0,
    "base_whole_limit_bytes": 0,
}
_CLEANS: Final[Mapping[str, Any]] = {
    "inline_limit_bytes": 0,
    "base_every_epochs": 2,
    "base_apart_every_epochs": 2,
    "base_apart_min_bytes": 0,
    "base_apart_ratio": 0.0,
    "clean_every_epochs": 2,
    "clean_min_age_s": 0.0,
}


class _HoldFrom:
    """Holds the requests of some verbs and of one group, from the nth on."""

    def __init__(self, place: Place, nth: int) -> None:
        self._place, self._left = place, nth
        self._lock = threading.Lock()

    def decide(self, facts: Facts, *, seed: int) -> Fault | None:
        """To hold it, or nothing."""
        if facts.verb not in self._place.verbs or self._place.group not in (None, facts.group):
            return None
        with self._lock:
            self._left -= 1
            return Fault.hold() if self._left < 1 else None


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a process is stopped: at a kind of request, or of call where the store is a folder.

    Attributes:
        group: of the requests; None: whatever they are about.
        folder: of the job, in which the call is made.
    """

    verbs: frozenset[Verb]
    group: str | None
    call: Call
    folder: str


COMMIT: Final = Place(verbs=frozenset({Verb.PUT_IF}), group="log/", call="link", folder="log")
UPLOAD: Final = Place(verbs=WRITES, group="base/", call="rename", folder="base")
CLEAN_UP: Final = Place(
    verbs=frozenset({Verb.DELETE, Verb.DELETE_MANY}), group=None, call="unlink", folder="log"
)


@contextlib.contextmanager
def stopped_at(stage: Stage, place: Place, *, landed: bool, nth: int = 1) -> Iterator[list[int]]:
    """Whoever comes to a place for the nth time is stopped there while the block runs.

    Args:
        landed: on files, whether what it was about to do is done; on S3 it is not.

    Returns:
        the numbers of the held requests; none on files.
    """
    if stage.proxy is None:
        assert stage.store is not None
        shim = shim_of(stage)
        with shim.calm_afterwards():
            part = f"{stage.store.resolve()}/{place.folder}/"
            shim.hold_at(place.call, part, when="after" if landed else "before", nth=nth)
            until_or_end(stage, shim.held, f"a {place.call} in {place.folder}/", _LIMIT_S)
            yield []
        return
    proxy = stage.proxy
    before = set(proxy.held())

    def held() -> list[int]:
        return [number for number in proxy.held() if number not in before]

    numbers: list[int] = []
    with planned(proxy, _HoldFrom(place, nth)):
        until_or_end(stage, held, f"a request for {place.folder}/", _LIMIT_S)
        yield numbers
        numbers += held()


def land(stage: Stage, numbers: Sequence[int]) -> None:
    """Deliver held requests whose client is gone. No driver is looked after meanwhile."""
    for number in numbers:
        if stage.proxy is not None:
            stage.proxy.release(number)
    time.sleep(_LANDS_S)


def _in_commit(stage: Stage, rng: random_numbers.Random) -> str:
    """The record is lost, has landed, or lands when another driver has taken over."""
    how = rng.choice(["lost", "landed", *(["late"] if stage.proxy else [])])
    with stopped_at(stage, COMMIT, landed=how == "landed") as held:
        stage.drivers.kill()
    if how == "landed":
        land(stage, held)
    stage.drivers.start()
    if how == "late":
        last = stage.committed()
        stage.until(
            lambda: stage.committed() > last or stage.has_read_all(),
            f"epoch {last + 1}, or the end of the input",
            _LIMIT_S,
        )
        land(stage, held)
    return {"lost": "the record was lost", "landed": "it landed", "late": "it came late"}[how]


def _in_upload(stage: Stage, rng: random_numbers.Random) -> str:
    """All executors are killed while a file of a base is on its way."""
    landed = rng.random() < 0.5
    with stopped_at(stage, UPLOAD, landed=landed, nth=rng.randrange(1, 4)) as held:
        _kill_executors(stage)
    if landed:
        land(stage, held)
    return "all executors; the file landed" if landed else "all executors; the file was lost"


def _kill_executors(stage: Stage) -> None:
    # Python first: a worker that was held goes on as soon as nobody holds it.
    stage.processes.kill(stage.processes.python_workers())
    stage.processes.kill(stage.processes.executors())


def _in_clean_up(stage: Stage, rng: random_numbers.Random) -> str:
    """The driver is killed when something of what nobody needs is deleted, and something not."""
    landed = rng.random() < 0.5
    nth = rng.randrange(1, 3)
    with stopped_at(stage, CLEAN_UP, landed=landed, nth=nth) as held:
        stage.drivers.kill()
    if landed:
        land(stage, held)
    stage.drivers.start()
    return f"at deletion {nth}, which was {'done' if landed else 'not done'}"


def _in_rewind(stage: Stage, rng: random_numbers.Random) -> str:
    """The driver is killed one epoch ahead of its log, and the next one while it goes back."""
    shim = shim_of(stage)
    landed = rng.random() < 0.5
    wanted = rng.choice(["commits", "offsets"])
    for _ in range(_REWINDS_TRIED):
        with stopped_at(stage, COMMIT, landed=False):
            last = _wait_until_still(stage)
            stage.drivers.kill()
        planned_ahead = (stage.checkpoint / "offsets" / str(last + 1)).exists()
        folder = wanted if planned_ahead else "commits"
        with shim.calm_afterwards():
            # To the hidden name that whoever goes back gives it.
            number = last if folder == "commits" else last + 1
            part = f"{stage.checkpoint.resolve()}/{folder}/.{number}."
            shim.hold_at("rename", part, when="after" if landed else "before")
            stage.drivers.start()
            stage.until(partial(_rewinds_or_goes_on, stage, shim, last), "a start", _LIMIT_S)
            rewinds = bool(shim.held())
            if rewinds:
                stage.drivers.kill()
        if rewinds:
            stage.drivers.start()
            return f"{'after' if landed else 'before'} a file of {folder}/ was taken back"
    raise CannotStrikeError("the driver was never ahead of its log")


def _rewinds_or_goes_on(stage: Stage, shim: Shim, last: int) -> bool:
    return bool(shim.held()) or stage.committed() > last


def _wait_until_still(stage: Stage) -> int:
    """The last epoch that Spark commits while its next batch waits for the record that is held."""
    last = -2
    while last != stage.committed():
        last = stage.committed()
        stage.pause(_STILL_S)
    return last


FAULTS: tuple[DrillFault, ...] = (
    DrillFault(
        name="crash-in-commit",
        summary="The driver is killed while the record of an epoch is on its way to the store, "
        "before it got there, after it, or so that it comes late.",
        promise="The next driver finds the record and counts it, or shuts it out for good; results "
        "are exact.",
        strike=_in_commit,
        needs=frozenset({"compiler"}),
    ),
    DrillFault(
        name="crash-in-upload",
        summary="All executors are killed while a base of large state is being uploaded.",
        promise="That base alone is lost, what was sent of it is never named, and results are "
        "exact.",
        strike=_in_upload,
        needs=frozenset({"compiler"}),
        settings=UPLOADS,
    ),
    DrillFault(
        name="crash-in-clean-up",
        summary="The driver is killed in the middle of deleting what nobody needs any more.",
        promise="Nothing that is needed is gone, a later clean-up finishes, and results are exact.",
        strike=_in_clean_up,
        needs=frozenset({"compiler"}),
        settings=_CLEANS,
    ),
    DrillFault(
        name="crash-in-rewind",
        summary="The driver is killed one epoch ahead of its log, and the next one while it goes "
        "back by that batch.",
        promise="The rewind is finished by whoever starts next, exactly that batch is repeated, "
        "and results are exact.",
        strike=_in_rewind,
        needs=frozenset({"async", "batches", "compiler"}),
    ),
)
