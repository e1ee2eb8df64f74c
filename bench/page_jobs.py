"""Made-up jobs for the page: of any width and any length of history, always the same ones."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recovery.inspect.history import (
    CheckpointFigures,
    History,
    JobMode,
    OperatorFigures,
    RestoreFigures,
    RestoreSummary,
    SubtaskFigures,
)
from recovery.savepoints.savepoint_list import SavepointInfo
from statebackend._setting_table import SETTINGS
from statebackend.ui.job_figures import (
    JobLine,
    JobView,
    LookedUpValue,
    OperatorState,
    RunFacts,
    SettingLine,
    StateLine,
    StoredFacts,
    Takeover,
    Waiting,
)
from statebackend.ui.page_charts import quantile

__all__ = ["MadeJob", "MadeJobs"]

NOW_MS = 1_795_000_000_000
_EVERY_MS = 10_000


@dataclass(frozen=True)
class MadeJob:
    """A job of so many subtasks and checkpoints; subtask ``slow`` takes longer than the others."""

    job: str
    subtasks: int = 40
    epochs: int = 200
    slow: int | None = 7
    mode: JobMode = "micro-batch"
    is_running: bool = True
    running: RunFacts | None = None

    @property
    def uri(self) -> str:
        return f"s3://state/{self.job}"

    def facts(self) -> RunFacts | StoredFacts:
        if self.running is not None:
            return self.running
        if not self.is_running:
            return StoredFacts(
                durable_epoch=self.epochs - 1,
                written_ms=NOW_MS - 86_400_000,
                writer="driver-1:4711",
                generation=3,
            )
        return RunFacts(
            active=True,
            continuous=self.mode == "continuous",
            epoch=self.epochs,
            durable_epoch=self.epochs - 1,
            running_s=2.1,
            durable_s=2.6,
            waiting=[
                Waiting(
                    operator="counter",
                    subtasks=list(range(0, self.subtasks, 3)),
                    parallelism=self.subtasks,
                )
            ],
            interval_s=10.0 if self.mode == "continuous" else None,
        )

    def history(self, before_epoch: int | None, limit: int) -> History:
        last = self.epochs if before_epoch is None else min(before_epoch, self.epochs)
        first = max(0, last - limit)
        return History(
            job=self.job,
            uri=self.uri,
            mode=self.mode,
            generation=3,
            newest_epoch=self.epochs - 1,
            checkpoints=[self._checkpoint(e, detail=False) for e in range(last - 1, first - 1, -1)],
            restores=[self._restore(e) for e in range(last - 1, first - 1, -1) if e % 150 == 0],
            next_before=first or None,
        )

    def checkpoint(self, epoch: int) -> CheckpointFigures | None:
        if not 0 <= epoch <= self.epochs:
            return None
        return self._checkpoint(epoch, detail=epoch > self.epochs - 70)

    def takeovers(self) -> list[Takeover]:
        return [
            Takeover(generation=n, writer=f"driver-{n}:4711", at_ms=NOW_MS - (4 - n) * 86_400_000)
            for n in (3, 2, 1)
        ]

    def savepoints(self) -> list[SavepointInfo]:
        return [
            SavepointInfo(
                id=f"sp{n}",
                uri=f"s3://state/.savepoints/{self.job}/sp{n}",
                job=self.job,
                complete=n > 0,
                epoch=self.epochs - 40 * n,
                created_ms=NOW_MS - n * 3_600_000,
                objects=12,
                size_bytes=4 << 20,
            )
            for n in range(3)
        ]

    def operators(self) -> list[OperatorState]:
        groups = max(128, self.subtasks)
        bounds = [round(n * groups / self.subtasks) for n in range(self.subtasks + 1)]
        chance = random.Random(self.job)
        return [
            OperatorState(
                uid="counter",
                parallelism=self.subtasks,
                max_parallelism=groups,
                first_epoch=0,
                state_bytes=self.subtasks * (3 << 20),
                dropped=False,
                key_groups=[(bounds[n], bounds[n + 1] - 1) for n in range(self.subtasks)],
                subtask_bytes=[int((3 << 20) * chance.uniform(0.8, 1.2)) for _ in bounds[1:]],
            )
        ]

    def states(self) -> list[StateLine]:
        made = ("counter", "count", "value", "user string", "", "n bigint", None, True)
        maps = ("counter", "by_page", "map", "user string", "page string", "n bigint", 60_000, True)
        names = ("operator", "state", "kind", "key_schema", "map_key_schema", "value_schema")
        return [
            StateLine(**dict(zip((*names, "ttl_ms", "looked_up"), one, strict=True)))  # type: ignore[arg-type]
            for one in (made, maps)
        ]

    def lookup(self, operator: str, state: str, key: Any) -> LookedUpValue:
        where = f"{operator} / {state} of {key!r} after checkpoint {self.epochs - 1}"
        return LookedUpValue(found=True, text='{"n": 42}', where=where)

    def settings(self) -> list[SettingLine] | None:
        if not self.is_running:
            return None
        return [
            SettingLine(
                name=name,
                key=f"spark.statebackend.{one.key}",
                value=str(one.default),
                origin=("argument", "session key", *(["default"] * 6))[number % 8],
                meaning=one.meaning,
            )
            for number, (name, one) in enumerate(SETTINGS.items())
        ]

    # --- made up -------------------------------------------------------------------------------

    def _checkpoint(self, epoch: int, *, detail: bool) -> CheckpointFigures:
        chance = random.Random(f"{self.job} {epoch}")
        begun_ms = NOW_MS - (self.epochs - epoch) * _EVERY_MS
        failed = self.mode == "continuous" and epoch % 37 == 5
        wave = 1 + 0.4 * math.sin(epoch / 9)
        ends = [self._subtask(n, chance, wave) for n in range(self.subtasks if detail else 8)]
        if epoch == self.epochs:
            ends = [one for one in ends if one.subtask % 3]
        sizes = sorted(one.end_to_end_ms or 0.0 for one in ends)
        slowest = max(ends, key=lambda one: one.end_to_end_ms or 0.0)
        commit_ms = round(chance.uniform(20, 60), 1)
        acks_ms = sizes[-1]
        phases: dict[str, float] = {}
        for one in ends:
            for name, took in one.timings_ms.items():
                phases[name] = max(took, phases.get(name, 0.0))
        operator = OperatorFigures(
            uid="counter",
            sequence=epoch + 3,
            subtasks=self.subtasks,
            delta_bytes=self.subtasks * 2_000,
            delta_rows=self.subtasks * 100,
            acks_ms=acks_ms,
            commit_ms=commit_ms,
            ack_median_ms=quantile(sizes, 0.5),
            ack_p95_ms=quantile(sizes, 0.95),
            slowest=slowest.subtask,
            slowest_on=f"{slowest.executor} on {slowest.host}",
            state_bytes=self.subtasks * (3 << 20),
            by_subtask=ends if detail else [],
        )
        running = epoch == self.epochs
        return CheckpointFigures(
            epoch=epoch,
            status="running" if running else "failed" if failed else "complete",
            reason="expired; it waited for counter/7" if failed else "",
            mode=self.mode,
            generation=3,
            attempt=epoch if failed else None,
            started_ms=begun_ms,
            total_ms=None if running else acks_ms + commit_ms,
            phases_ms={**phases, "acks": acks_ms, "commit": commit_ms},
            delta_bytes=self.subtasks * 2_000,
            delta_rows=self.subtasks * 100,
            rows=self.subtasks * 1_000,
            state_bytes=self.subtasks * (3 << 20),
            watermark_ms=begun_ms - 60_000,
            has_detail=detail,
            operators=[] if failed else [operator],
        )

    def _subtask(self, number: int, chance: random.Random, wave: float) -> SubtaskFigures:
        slow = 4.0 if number == self.slow else 1.0
        if self.mode == "continuous":
            timings = {
                "start_delay": chance.uniform(1, 30) * wave,
                "alignment": chance.uniform(1, 60) * wave * slow,
                "sync": chance.uniform(2, 9),
                "async": chance.uniform(15, 45) * wave,
            }
        else:
            timings = {
                "read": chance.uniform(20, 60) * wave,
                "restore": chance.uniform(1, 3),
                "process": chance.uniform(150, 260) * wave * slow,
                "snapshot": chance.uniform(4, 12),
            }
        timings = {name: round(took, 2) for name, took in timings.items()}
        delay = 0.0 if self.mode == "continuous" else round(chance.uniform(0, 25), 2)
        return SubtaskFigures(
            subtask=number,
            executor=str(number % 8),
            host=f"10.0.3.{10 + number % 8}",
            start_delay_ms=delay or timings.get("start_delay"),
            end_to_end_ms=round(sum(timings.values()) + delay, 2),
            timings_ms=timings,
            rows=int(1_000 * (slow if slow > 1 else chance.uniform(0.9, 1.1))),
            delta_bytes=2_000,
            delta_rows=100,
        )

    def _restore(self, epoch: int) -> RestoreSummary:
        at_ms = NOW_MS - (self.epochs - epoch) * _EVERY_MS
        slowest = [
            RestoreFigures(
                operator="counter",
                subtask=n,
                epoch=epoch,
                generation=3,
                at_ms=at_ms,
                source="durable" if n % 2 else "local",
                local_bytes=(3 << 20) * (1 - n % 2),
                durable_bytes=(3 << 20) * (n % 2),
                durable_reads=2 * (n % 2),
                seconds=1.4 - n / 20,
                host=f"10.0.3.{10 + n % 8}",
                executor=str(n % 8),
                reason="there is no local copy on this host" if n % 2 else "",
            )
            for n in range(min(16, self.subtasks))
        ]
        durable = self.subtasks // 2
        return RestoreSummary(
            operator="counter",
            epoch=epoch,
            generation=3,
            at_ms=at_ms,
            subtasks=self.subtasks,
            by_source={"local": self.subtasks - durable, "durable": durable},
            local_bytes=(3 << 20) * (self.subtasks - durable),
            durable_bytes=(3 << 20) * durable,
            max_seconds=1.4,
            slowest=slowest,
        )


@dataclass(frozen=True)
class MadeJobs:
    """Some of them."""

    jobs: Sequence[MadeJob]
    where: str = "s3://state"

    def lines(self) -> list[JobLine]:
        return [
            JobLine(
                job=one.job,
                epoch=one.epochs - 1,
                size_bytes=one.subtasks * (3 << 20),
                written_ms=NOW_MS,
                running=one.is_running,
            )
            for one in self.jobs
        ]

    def view(self, job: str) -> JobView | None:
        return next((one for one in self.jobs if one.job == job), None)
