"""A job's requests to an object store, cut before and after every one of them that changes it.

A cut is an error that nothing catches; then a new driver starts. Besides, each such request may be
lost, or its answer, and the driver lives on.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal
from unittest import mock

from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import StateBackendError
from tests.crash.life import (
    LONG_S,
    TRUTHS,
    Kind,
    changes_of,
    check_store,
    few_epochs_an_object,
    job_on,
    last_epoch,
    named,
)
from tests.recovery.restore.one_subtask_job import Job
from tests.support.failing_store import FailingStore, Failure

__all__ = ["EPOCHS", "How", "RequestsTried", "lived_on_requests", "try_requests"]

WRITES: Final = ("put", "put_file", "put_chunks", "create", "delete")
EPOCHS: Final = 9
How = Literal["killed before", "killed after", "request lost", "answer lost"]
HOWS: Final[tuple[How, ...]] = ("killed before", "killed after", "request lost", "answer lost")


class Killed(BaseException):
    """The process is gone."""


class Plan:
    """What happens to the write of a number, from 0."""

    def __init__(self, number: int, how: How) -> None:
        self.number, self.how = number, how
        self.writes: list[tuple[str, str]] = []
        self.dead = False

    def __call__(self, verb: str, name: str, count: int) -> Failure:
        if self.dead:
            return Killed()
        if verb not in WRITES:
            return None
        number = len(self.writes)
        self.writes.append((verb, name))
        if self.how == "killed after":
            self.dead = number > self.number
        elif number == self.number:
            if self.how == "request lost":
                return "before"
            if self.how == "answer lost":
                return "after"
            self.dead = True
        return Killed() if self.dead else None


@dataclass
class RequestsTried:
    """What came of it."""

    requests: Counter[str] = field(default_factory=Counter)
    cuts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


def lived_on_requests(job: Job, plan: Plan) -> None:
    """Epochs until the end, or the client's. What is lost is tried again, as Spark would."""
    with contextlib.suppress(Killed):
        while job.epoch < EPOCHS and not plan.dead:
            try:
                job.run(changes_of(job.epoch))
            except StateBackendError:
                job.opened.directory.release()
                if job.started.session.failure is not None:
                    job.started.session.drain(LONG_S)
                    job.restart(min(job.epoch, last_epoch(job.store) + 1))
            job.started.session.drain(LONG_S)
    job.opened.directory.release()


def step_of(verb: str, name: str) -> str:
    """The step of the protocol that a request belongs to."""
    if verb == "delete":
        return "clean-up"
    folder = name.partition("/")[0]
    names = {"log": "record", "data": "large slice", "base": "base upload"}
    return names.get(folder, folder)


@few_epochs_an_object
@mock.patch("snapshot.retention.garbage_collection.DELETE_BATCH", 1)  # each deletion is a request
def try_requests(kind: Kind, root: Path, share: tuple[int, int] = (0, 1)) -> RequestsTried:
    """Cut everywhere.

    Args:
        root: an empty folder for local copies.
        share: of (part, parts): every so-many-th cut, beginning with that one.
    """
    whole = Plan(-1, "killed before")
    job = job_on(root / "all", FailingStore(MemoryStore(), whole), kind)
    lived_on_requests(job, whole)
    assert job.started.session.cleaner.reports
    tried = RequestsTried()
    tried.requests.update(step_of(*write) for write in whole.writes)
    cuts = [(n, how) for n in range(1, len(whole.writes)) for how in HOWS]  # 0: there is no job
    for number, how in cuts[share[0] :: share[1]]:
        step = step_of(*whole.writes[number])
        tried.cuts[f"{step}, {how}"] += 1
        try:
            _cut(kind, root / f"{number}-{how}", Plan(number, how))
        except (AssertionError, StateBackendError, OSError) as error:
            tried.violations.append(f"{number} ({step}) {how}: {type(error).__name__}: {error}")
    return tried


def _cut(kind: Kind, root: Path, plan: Plan) -> None:
    inner: ObjectStore = MemoryStore()
    job = job_on(root, FailingStore(inner, plan), kind)
    lived_on_requests(job, plan)
    named(inner)
    last = last_epoch(inner)
    # Spark has committed the batch before this one, and goes back by that at most.
    assert last >= job.epoch - (2 if kind.asynchronous else 1), f"{last} after {job.epoch}"
    job.epoch = min(job.epoch, last + 1)
    again = job_on(root, inner, kind)
    again.truth, again.attempts = dict(TRUTHS), job.attempts
    again.restart(job.epoch)
    for host in ("h", "elsewhere"):
        again.open(host).directory.release()  # compares marker and content
    for _ in range(2):
        again.run(changes_of(again.epoch))
        again.started.session.drain(LONG_S)
    again.opened.directory.release()
    named(inner)
    again.restart()
    check_store(inner)
    again.open("third").directory.release()
    assert again.truth == TRUTHS
