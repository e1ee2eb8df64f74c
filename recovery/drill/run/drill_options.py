"""What `run_drill` was asked for: names looked up, and refused where they mean nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from recovery.drill.faults.drill_fault import DrillFault
from recovery.drill.faults.needs import Given, missing
from recovery.drill.jobs.drill_job import DrillJob
from recovery.drill.jobs.job_kinds import KINDS, Kind
from recovery.drill.jobs.named_functions import address_of
from recovery.drill.run.strike_schedule import Strike
from statebackend.errors import SettingError
from statebackend.texts import did_you_mean

__all__ = ["DrillOptions", "FaultLike", "check_name", "impossible", "named_faults", "named_job"]

FaultLike = str | DrillFault | Strike


def check_name(name: str, known: Iterable[str], *, kind: str) -> None:
    """Nothing, if the name is known.

    Raises:
        SettingError: it is not; the text names the nearest ones.
    """
    names = list(known)
    if name not in names:
        meant = did_you_mean(name, names, most=3)
        raise SettingError(
            f"There is no {kind} {name!r}.",
            todo=f"{meant} `statebackend drill list` shows all.".strip(),
        )


def named_job(
    job: DrillJob | str | Callable[..., Any],
    truth: Callable[[Path], Iterable[Sequence[Any]]] | None,
) -> DrillJob:
    """The job that is meant, with its truth. Raises `SettingError`."""
    from recovery.drill.jobs.bundled_jobs import BUNDLED

    if isinstance(job, str):
        check_name(job, BUNDLED, kind="job")
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
    for name in (fault for fault in given if isinstance(fault, str)):
        check_name(name, ALL, kind="fault")
    return [ALL[fault] if isinstance(fault, str) else fault for fault in given]


def impossible(
    faults: Iterable[FaultLike],
    *,
    cluster: str = "",
    store: str = "file",
    commit: str = "sync",
    kind: str = "batches",
) -> dict[str, str]:
    """The faults that cannot be made in a drill with these options, each with the reason.

    What only the drill finds out, such as a missing compiler, is not among the reasons.

    Raises:
        SettingError: there is no fault of such a name.
    """
    given = Given(cluster=cluster, s3=store != "file", commit=commit, compiler=True, kind=kind)
    reasons: dict[str, str] = {}
    for one in named_faults(list(faults)):
        fault = one.fault if isinstance(one, Strike) else one
        if reason := missing(fault, given):
            reasons[fault.name] = reason
    return reasons


@dataclass(frozen=True, kw_only=True)
class DrillOptions:
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
