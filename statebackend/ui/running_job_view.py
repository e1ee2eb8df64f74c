"""A job that this driver runs: as its store shows it, and what is not in the store yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar

import msgspec

from recovery.inspect.history import (
    CheckpointFigures,
    History,
)
from recovery.savepoints.savepoint_list import SavepointInfo
from snapshot.log.figures_book import EpochSeen
from snapshot.log.progress_book import ProgressBook
from snapshot.log.progress_events import EpochProgress, ProgressEvent, SubtaskProgress
from snapshot.protocol.running_job import RunningJob
from snapshot.storage.store_options import StoreOptions
from statebackend._setting import PREFIX
from statebackend.errors import NotRestorableError, StoreUnreachableError
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.job_status import JobStatus, UnderWay, under_way_in
from statebackend.runtime.driver.session import RunSession
from statebackend.settings import SETTINGS, Settings
from statebackend.tables.state_lookup import LookedUp, StateLookup
from statebackend.ui.job_figures import (
    LookedUpValue,
    OperatorState,
    RunFacts,
    SettingLine,
    StateLine,
    StoredFacts,
    Takeover,
)
from statebackend.ui.newer_driver import NewerDriver
from statebackend.ui.stored_job_view import StoredJobView, as_text
from statebackend.ui.under_way_figures import (
    moved_at_s,
    operator_now,
    restores_now,
    waiting_of,
)

__all__ = ["Observed", "RunningJobView", "setting_lines"]

_STORE_S: Final = 3.0  # for the page's own reads: somebody waits, and the store may be down
_HIDDEN: Final = "(not shown)"
T = TypeVar("T")


class Observed(Protocol):
    """A job that this driver runs; see `statebackend.monitoring.observed_job.ObservedJob`."""

    @property
    def job(self) -> Job:
        """The job."""

    @property
    def settings(self) -> Settings:
        """Those that it was started with."""

    @property
    def progress(self) -> ProgressBook:
        """Its events."""

    @property
    def session(self) -> Callable[[], RunSession | None]:
        """Gives that of the run that runs."""

    @property
    def is_active(self) -> Callable[[], bool]:
        """Says whether it runs."""

    @property
    def continuous(self) -> bool:
        """Whether it is a continuous job."""

    @property
    def restarts(self) -> Callable[[], int]:
        """Says how often it was started again."""

    @property
    def status(self) -> Callable[[], JobStatus]:
        """Says how it stands, as its mode knows it."""

    @property
    def committed(self) -> Callable[[], int] | None:
        """Says which batch Spark has committed last."""


class RunningJobView:
    """One job of this driver.

    What was read of the store is kept until a checkpoint is complete, so a page that is read anew
    every few seconds asks the store no more often than the job commits. While the store does not
    answer, what was read last is shown.
    """

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        job = observed.job
        self._system = job.system
        self._stored = StoredJobView(job.uri, job.name, _sooner(job.options), job.system)
        self._newer = NewerDriver(self._stored.store, job.name, job.system.monotonic_s())
        self._lookups = StateLookup(job)
        self._durable_at_s: float | None = None
        self._durable_epoch: int | None = None
        self._version = 0
        self._kept: dict[tuple[int | None, int], tuple[int, History]] = {}
        self._end = observed.progress.listen(self._heard)

    def close(self) -> None:
        """Listen no more: another start of the job has a view of its own."""
        self._end()

    def _heard(self, event: ProgressEvent) -> None:
        if isinstance(event, EpochProgress):
            self._durable_at_s = self._system.monotonic_s()
            self._durable_epoch = event.epoch
            self._version += 1

    @property
    def job(self) -> str:
        """Its name."""
        return self._observed.job.name

    @property
    def uri(self) -> str:
        """The folder of it."""
        return self._stored.uri

    @property
    def is_running(self) -> bool:
        """Whether it runs now; not while it starts."""
        return self._observed.is_active()

    # --- how it stands -------------------------------------------------------------------------

    @property
    def durable_epoch(self) -> int | None:
        """The newest checkpoint that is in the store, as far as this process knows."""
        _, durable = self._under_way(self._observed.session(), self._observed.status())
        return self._durable_epoch if durable is None else durable

    def facts(self) -> RunFacts | StoredFacts:
        """How it stands now; asks Spark, and the store where nothing was committed for long."""
        observed, now_s = self._observed, self._system.monotonic_s()
        session, status = observed.session(), observed.status()
        under_way, durable = self._under_way(session, status)
        seen = None if observed.continuous else self._seen(under_way)
        failed = session.failure if session is not None else None
        writing_at_s = observed.progress.commit_since_s
        out_s = observed.job.store.unreachable_s
        active = self.is_running
        failure = status.failure or (f"[{failed.code}] {failed.what}" if failed else "")
        if active and not failure and not out_s:
            failure = self._claimed_since(now_s)
        begun = session is not None and session.looked_at(lambda run: True)
        return RunFacts(
            active=active,
            starting=not begun and not failure and (active or session is not None),
            failure=failure,
            continuous=observed.continuous,
            epoch=under_way.epoch if under_way else None,
            durable_epoch=self._durable_epoch if durable is None else durable,
            running_s=_ago(now_s, under_way.began_s if under_way else None),
            durable_s=_ago(now_s, self._durable_at_s),
            waiting=waiting_of(under_way, seen),
            moved_s=_ago(now_s, moved_at_s(seen or {})),
            store_out_s=out_s or None,
            writing=writing_at_s is not None,
            writing_s=_ago(now_s, writing_at_s) or 0.0,
            input=status.input,
            behind=status.behind,
            restarts=observed.restarts(),
            interval_s=status.interval_s,
            asynchronous=observed.settings.commit == "async" and not observed.continuous,
        )

    def _claimed_since(self, now_s: float) -> str:
        writer = self._newer.than(self._generation(), self._durable_at_s, now_s)
        return writer and f"another driver ({writer}) has claimed the job."

    def _under_way(
        self, session: RunSession | None, status: JobStatus
    ) -> tuple[UnderWay | None, int | None]:
        """The checkpoint that is not complete yet, and the newest that is durable."""
        found: tuple[UnderWay | None, int | None] | None = None
        if session is not None:
            found = session.looked_at(lambda run: (under_way_in(run), _durable(run)))
        own, durable = found or (None, None)
        if self._observed.continuous:
            return status.under_way, durable
        return own and self._with_begin(own), durable

    def _seen(self, under_way: UnderWay | None) -> dict[str, EpochSeen]:
        """By operator, which subtasks of a checkpoint have begun and acked."""
        if under_way is None:
            return {}
        figures, epoch = self._observed.progress.figures, under_way.epoch
        seen = {uid: figures.seen(uid, epoch) for uid in under_way.parallelism}
        return {uid: one for uid, one in seen.items() if one is not None}

    def _with_begin(self, own: UnderWay) -> UnderWay:
        began_s = min((one.began_s for one in self._seen(own).values()), default=None)
        return UnderWay(
            epoch=own.epoch,
            began_s=began_s,
            missing=own.missing,
            parallelism=own.parallelism,
            writing=own.writing,
        )

    # --- checkpoints ---------------------------------------------------------------------------

    def history(self, before_epoch: int | None, limit: int) -> History:
        """See `JobView`; with the restores of a checkpoint that is under way."""
        found = self._history(before_epoch, limit)
        under_way = None
        if before_epoch is None:
            under_way, _ = self._under_way(self._observed.session(), self._observed.status())
        if under_way is None:
            return found
        known = {(one.operator, one.epoch) for one in found.restores}
        acked, began_ms = self._acked(under_way), self._began_ms(under_way)
        now = [
            one
            for one in restores_now(acked, self._generation(), began_ms)
            if (one.operator, one.epoch) not in known
        ]
        return msgspec.structs.replace(found, restores=[*now, *found.restores])

    def _history(self, before_epoch: int | None, limit: int) -> History:
        asked, version = (before_epoch, limit), self._version
        kept = self._kept.get(asked)
        if kept is not None and kept[0] == version:
            return kept[1]
        try:
            found = self._stored.history(before_epoch, limit)
        except NotRestorableError:
            return self._empty()
        except StoreUnreachableError as error:
            if kept is None:
                raise
            old = (
                f"The store does not answer: this list is as it was when it last did. {error.what}"
            )
            return _with_problem(kept[1], old)
        checkpoints = _with_commits(found.checkpoints, self._commits_ms())
        found = msgspec.structs.replace(found, checkpoints=checkpoints)
        self._kept = {**dict(list(self._kept.items())[-4:]), asked: (version, found)}
        return found

    def _empty(self) -> History:
        """Of a job that is starting: nothing is in its log yet."""
        return History(
            job=self.job,
            uri=self.uri,
            mode="continuous" if self._observed.continuous else "micro-batch",
            generation=0,
            newest_epoch=None,
            checkpoints=[],
            restores=[],
        )

    def checkpoint(self, epoch: int) -> CheckpointFigures | None:
        """See `JobView`; of one that is under way, as far as it has come."""
        observed = self._observed
        session = observed.session()
        under_way, _ = self._under_way(session, observed.status())
        if under_way is not None and under_way.epoch == epoch:
            return self._running(under_way)
        found = _or(None, lambda: self._stored.checkpoint(epoch))
        return found and _with_commits([found], self._commits_ms())[0]

    def _commits_ms(self) -> dict[int, float]:
        return {one.epoch: one.commit_ms for one in self._observed.progress.summary(None).epochs}

    def _running(self, under_way: UnderWay) -> CheckpointFigures:
        observed, acked = self._observed, self._acked(under_way)
        figures = observed.progress.figures
        operators = [
            operator_now(
                uid,
                parallelism,
                under_way.missing.get(uid, ()),
                [one for one in acked if one.operator == uid],
                figures.seen(uid, under_way.epoch),
            )
            for uid, parallelism in under_way.parallelism.items()
        ]
        took_s = _ago(self._system.monotonic_s(), under_way.began_s)
        return CheckpointFigures(
            epoch=under_way.epoch,
            status="running",
            mode="continuous" if observed.continuous else "micro-batch",
            generation=self._generation(),
            started_ms=self._began_ms(under_way),
            total_ms=None if took_s is None else 1000 * took_s,
            delta_bytes=sum(one.delta_bytes for one in operators),
            delta_rows=sum(one.delta_rows for one in operators),
            has_detail=True,
            operators=operators,
        )

    def _acked(self, under_way: UnderWay) -> list[SubtaskProgress]:
        seen = self._observed.progress.summary(under_way.epoch).subtasks
        return [one for one in seen if one.epoch == under_way.epoch]

    def _began_ms(self, under_way: UnderWay) -> int | None:
        took_s = _ago(self._system.monotonic_s(), under_way.began_s)
        return None if took_s is None else self._system.wall_ms() - round(1000 * took_s)

    def _generation(self) -> int:
        session = self._observed.session()
        found = session.looked_at(lambda run: run.generation) if session is not None else None
        return found or 0

    # --- the rest ------------------------------------------------------------------------------

    def takeovers(self) -> list[Takeover]:
        """See `JobView`."""
        return _or([], self._stored.takeovers)

    def savepoints(self) -> list[SavepointInfo]:
        """See `JobView`."""
        return self._stored.savepoints()

    def operators(self) -> list[OperatorState]:
        """See `JobView`."""
        return _or([], self._stored.operators)

    def states(self) -> list[StateLine]:
        """See `JobView`."""
        return _or([], self._stored.states)

    def lookup(self, operator: str, state: str, key: Any) -> LookedUpValue:
        """The newest confirmed value, as `StateBackend.lookup`."""
        at = LookedUp(self._observed.session(), self._observed.committed)
        (value,) = self._lookups.values(at, operator, state, [key])
        where = "The newest confirmed value."
        if value is None:
            return LookedUpValue(found=False, text="The key has no such state.", where=where)
        return LookedUpValue(found=True, text=as_text(_plain(value)), where=where)

    def settings(self) -> list[SettingLine] | None:
        """All, with what is secret hidden."""
        return setting_lines(self._observed.settings)


def _or(nothing: T, read: Callable[[], T]) -> T:
    """What is read; of a job that is starting there is nothing yet."""
    try:
        return read()
    except NotRestorableError:
        return nothing


def _sooner(known: StoreOptions) -> StoreOptions:
    """For somebody who waits: calls of the store are given up sooner."""
    return replace(
        known,
        deadline_s=min(_STORE_S, known.deadline_s),
        connect_timeout_s=min(_STORE_S, known.connect_timeout_s),
        read_timeout_s=min(_STORE_S, known.read_timeout_s),
    )


def setting_lines(settings: Settings) -> list[SettingLine]:
    """Every setting; those that were given come first."""
    lines = []
    for name, setting in SETTINGS.items():
        value = getattr(settings, name)
        hidden = setting.secret and value != setting.default
        lines.append(
            SettingLine(
                name=name,
                key=PREFIX + setting.key,
                value=_HIDDEN if hidden else str(value),
                origin=settings.origins.get(name, "default"),
                meaning=setting.meaning,
            )
        )
    return sorted(lines, key=lambda line: line.origin == "default")


def _durable(run: RunningJob) -> int | None:
    """The newest epoch that every operator has in the log."""
    lineages = [one.lineage for one in run.operators.values()] or list(run.lineages.values())
    last = min((one.last_epoch for one in lineages if one.epochs), default=-1)
    return last if last >= 0 else None


def _ago(now_s: float, at_s: float | None) -> float | None:
    return None if at_s is None else max(0.0, now_s - at_s)


def _with_problem(history: History, problem: str) -> History:
    return msgspec.structs.replace(history, problems=[problem, *history.problems])


def _with_commits(
    checkpoints: Sequence[CheckpointFigures], commits_ms: Mapping[int, float]
) -> list[CheckpointFigures]:
    """The newest record cannot say how long it took to write itself: the driver can."""
    return [
        msgspec.structs.replace(one, phases_ms={**one.phases_ms, "commit": commits_ms[one.epoch]})
        if "commit" not in one.phases_ms and one.epoch in commits_ms
        else one
        for one in checkpoints
    ]


def _plain(value: Any) -> Any:
    """Rows of Spark's as dictionaries."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return [{"map_key": _plain(key), "value": _plain(one)} for key, one in value.items()]
    return value.asDict(recursive=True) if hasattr(value, "asDict") else value
