"""What `run_drill` was asked for: names looked up, and refused where they mean nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from recovery.drill.driver.driver_messages import address_of
from recovery.drill.jobs.drill_job import DrillJob
from recovery.drill.jobs.job_kinds import KINDS, Kind
from recovery.drill.run.schedule import DrillFault, Strike
from statebackend.errors import SettingError

__all__ = ["FaultLike", "Order", "has_timers", "named_faults", "named_job"]

FaultLike = str | DrillFault | Strike


def named_job(
    job: DrillJob | str | Callable[..., Any],
    truth: Callable[[Path], Iterable[Sequence[Any]]] | None,
) -> DrillJob:
    """The job that is meant, with its truth. Raises `SettingError`."""
    from recovery.drill.jobs.bundled_jobs import BUNDLED

    if isinstance(job, str):
        if job not in BUNDLED:
            raise SettingError(
                f"There is no job of the name {job!r}.", todo=f"There are {', '.join(BUNDLED)}."
            )
        job = BUNDLED[job]
    if isinstance(job, DrillJob):
        return job if truth is None else replace(job, truth=truth)
    if not callable(job):
        raise SettingError(f"The job is {job!r}.", todo="Give a DrillJob, a name or a function.")
    if truth is None:
        raise SettingError(
            "A job of your own needs truth=: nobody else knows what it must put out.",
            todo="Give a function of the drill's folder that gives the expected rows.",
        )
    return DrillJob(name=getattr(job, "__name__", "job"), build=job, truth=truth)


def named_faults(faults: FaultLike | Sequence[FaultLike]) -> list[DrillFault | Strike]:
    """The faults that are meant. Raises `SettingError`."""
    from recovery.drill.catalogue import ALL

    given = [faults] if isinstance(faults, str | DrillFault | Strike) else list(faults)
    strange = [fault for fault in given if isinstance(fault, str) and fault not in ALL]
    if strange:
        raise SettingError(
            f"There is no fault of the name {strange[0]!r}.",
            todo=f"There are {', '.join(sorted(ALL))}.",
        )
    return [ALL[fault] if isinstance(fault, str) else fault for fault in given]


@dataclass(frozen=True, kw_only=True)
class Order:
    """What was asked for."""

    job: DrillJob
    faults: list[DrillFault | Strike]
    at_epoch: int | None
    duration_s: float | None
    seed: int
    cluster: str
    commit: Literal["sync", "async"]
    store: str
    subtasks: int | None
    say: Callable[[str], None]

    @property
    def s3(self) -> bool:
        """Whether the store is one."""
        return self.store == "s3" or self.store.startswith("s3://")

    @property
    def kind(self) -> Kind:
        """Of the job."""
        return KINDS[self.job.kind]

    @property
    def parallelism(self) -> int:
        """As it was given, or as many subtasks as a job of this kind has if nobody says."""
        return self.kind.subtasks(self.cluster) if self.subtasks is None else self.subtasks

    def check(self) -> None:
        """Refuse what cannot mean anything, before anything is started."""
        address_of(self.job.build)
        self._check_kind()
        if self.store != "file" and not self.s3:
            raise SettingError(
                f"The store is {self.store!r}.", todo="Give file, s3 or an s3:// URI."
            )
        if self.store.startswith("s3://") and not self.upstream_given():
            raise SettingError(
                f"A drill on {self.store} needs the server's endpoint over plain HTTP: its proxy "
                "stands in between.",
                todo="Give the job settings={'s3_endpoint': 'http://host:port'}.",
            )
        if self.duration_s is not None and self.duration_s <= 0:
            raise SettingError(f"duration_s is {self.duration_s}.", todo="Give a number over 0.")
        if self.duration_s is not None and self.job.feed is None:
            raise SettingError(
                f"The job {self.job.name!r} has no feed: it would run out of input.",
                todo="Give a DrillJob with feed=, or leave duration_s out.",
            )

    def _check_kind(self) -> None:
        if self.job.kind not in KINDS:
            raise SettingError(
                f"The job's kind is {self.job.kind!r}.", todo=f"Give one of {', '.join(KINDS)}."
            )
        if self.commit not in self.kind.commits:
            raise SettingError(
                f"A {self.job.kind} job has no commit={self.commit!r}.",
                todo=f"Give {' or '.join(sorted(self.kind.commits))}.",
            )
        most = self.kind.subtasks_max(self.cluster)
        if self.kind.in_slots and not 0 < self.parallelism <= most:
            raise SettingError(
                f"The parallelism is {self.parallelism}, and {self.cluster} has {most} task slots: "
                "each subtask of a continuous job takes one.",
                todo="Lower it, or name another cluster, such as local[4].",
            )

    def upstream_given(self) -> str:
        """The `host:port` of the job's own server; empty if there is none over plain HTTP."""
        parts = urlsplit(str(self.job.settings.get("s3_endpoint", "")))
        return f"{parts.hostname}:{parts.port or 80}" if parts.scheme == "http" else ""

    def names(self) -> list[str]:
        """The faults that must be made, each as often; in a soak, which draws, each once."""
        if self.duration_s is not None:
            return list(dict.fromkeys(fault.name for fault in self.pool())) if self.faults else []
        return [fault.name for fault in self.pool()]

    def pool(self) -> list[DrillFault]:
        """The faults that may strike; for a soak that names none, all that have a weight."""
        from recovery.drill.catalogue import ALL

        if self.duration_s is not None and not self.faults:
            return [fault for fault in ALL.values() if fault.weight > 0]
        return [f.fault if isinstance(f, Strike) else f for f in self.faults]


def has_timers(job: DrillJob) -> bool | None:
    """Whether a job sets timers; None: nobody knows."""
    from recovery.drill.jobs.bundled_jobs import BUNDLED

    return "windows" in job.name or job.name == "timers" if job.name in BUNDLED else None
