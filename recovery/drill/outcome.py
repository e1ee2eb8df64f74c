"""What a drill ends with: plain data, the same in JSON, as text and on the page."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from snapshot.messages import RestoreReport

__all__ = [
    "REPORT_VERSION",
    "DrillReport",
    "DriverLife",
    "EpochDone",
    "Recovery",
    "RequestCount",
    "Struck",
    "Verdict",
]

REPORT_VERSION: Final = 1
EXAMPLES_MAX: Final = 10


class EpochDone(msgspec.Struct, frozen=True, kw_only=True):
    """Spark committed a batch.

    Attributes:
        at_s: seconds since the drill began, as all `at_s` here.
        driver: the number of the driver that ran it, from 1.
    """

    epoch: int
    at_s: float
    driver: int


class DriverLife(msgspec.Struct, frozen=True, kw_only=True):
    """One driver process.

    Attributes:
        ready_s: when its query had started; None if it never had.
        ended_s: when it was gone.
        ending: why: `finished`, `killed` (by the drill), or `failed` with the error's first line.
        error: the error's text, shortened; empty if there was none.
    """

    number: int
    started_s: float
    ready_s: float | None
    ended_s: float | None
    ending: Literal["finished", "killed", "failed", "running"]
    error: str = ""


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that was made to happen, or could not be.

    Attributes:
        at_epoch: the last epoch that Spark had committed by then; -1 for none.
        until_s: when it was taken back (a store that was down, a process that thawed).
        target: to what: a process, a host, a file, a kind of request.
        skipped: why it could not be made on this machine or with this job; empty if it was.
        recovered_s: from the strike to the next epoch that was committed after it; None: none was.
    """

    fault: str
    at_s: float
    at_epoch: int
    target: str = ""
    until_s: float | None = None
    skipped: str = ""
    recovered_s: float | None = None


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """A subtask that got its state back."""

    at_s: float
    driver: int
    report: RestoreReport


class RequestCount(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that the object store got, by verb and by folder of the job (`log`, `data`, ...)."""

    verb: str
    group: str
    requests: int
    faulted: int
    in_bytes: int
    out_bytes: int


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the results were found to be, against the truth that was made without Spark.

    Attributes:
        exact: nothing lost, duplicated or wrong, and the job came to its end.
        expected, found: rows of the truth and of the job's output.
        lost: rows of the truth that the output has not. duplicated: rows that it has too often.
        wrong: rows that are in no truth.
        examples: the first few of them, as text, with the kind in front.
        failure: why the job did not come to its end; empty if it did.
    """

    exact: bool
    expected: int
    found: int
    lost: int
    duplicated: int
    wrong: int
    examples: list[str] = []
    failure: str = ""


class DrillReport(msgspec.Struct, frozen=True, kw_only=True):
    """A whole drill.

    Attributes:
        seed: gives the same faults at the same epochs again.
        command: what to type for that; empty if the drill was run from Python.
        cluster: `two-hosts`, or a Spark master.
        store: `file` or `s3`.
        settings: the backend's settings and commit mode that were asked for.
        duration_s: from the first start to the verdict.
    """

    version: int = REPORT_VERSION
    job: str
    seed: int
    command: str
    cluster: str
    store: str
    commit: str
    started_at: str
    duration_s: float
    verdict: Verdict
    faults: list[Struck]
    drivers: list[DriverLife]
    epochs: list[EpochDone]
    recoveries: list[Recovery]
    requests: list[RequestCount]
    warnings: list[str] = []

    @property
    def exact(self) -> bool:
        """Whether the results were exact and every fault was made that was asked for."""
        return self.verdict.exact
