"""What a drill ends with: plain data, and the JSON of it."""

from __future__ import annotations

from collections import Counter
from typing import Final, Literal

import msgspec

from snapshot.protocol.messages import RestoreReport

__all__ = [
    "NOTHING_COMPARED",
    "REPORT_VERSION",
    "DrillReport",
    "DriverLife",
    "EpochDone",
    "Recovery",
    "RequestCount",
    "Struck",
    "Verdict",
    "json_text",
]

REPORT_VERSION: Final = 1
EXAMPLES_MAX: Final = 10
NOTHING_COMPARED: Final = "nothing was compared: the truth and the output have no rows"


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
        restarts: how often a continuous job failed and started again in it.
    """

    number: int
    started_s: float
    ready_s: float | None
    ended_s: float | None
    ending: Literal["finished", "killed", "failed", "running"]
    error: str = ""
    restarts: int = 0


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that was made to happen, or could not be.

    Attributes:
        at_epoch: the last epoch that Spark had committed by then; -1 for none.
        until_s: when it was taken back (a store that was down, a process that thawed).
        target: to what: a process, a host, a file, a kind of request.
        skipped: why it does not count as made: it could not be made on this machine or with this
            job, or it struck a job that had nothing left to do. Empty if it was made.
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
        exact: nothing lost, duplicated or wrong, something to compare, and the job came to its end.
        expected, found: rows of the truth and of the job's output.
        lost: rows of the truth that the output has not. duplicated: rows that it has too often.
        wrong: rows that are in no truth.
        examples: the first few of them, as text, with the kind in front.
        failure: why the job did not come to its end, or why there was nothing to compare; else
            empty.
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
        duration_s: from the first start to the verdict.
        asked: names of the faults that were asked for, each as often as it was to be made. For a
            soak each once; empty for one that names none.
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
    asked: list[str] = []

    @property
    def exact(self) -> bool:
        """Whether the results were exact and every fault was made that was asked for.

        `verdict.exact` is about the results alone.
        """
        return self.verdict.exact and not self.not_struck

    @property
    def not_struck(self) -> dict[str, str]:
        """The faults that were not made as often as they were asked for, each with the reason.

        A drill without them shows less than was asked, however right its results are.
        """
        reasons: dict[str, str] = {}
        for name, times in Counter(self.asked).items():
            tries = [one for one in self.faults if one.fault == name]
            if sum(1 for one in tries if not one.skipped) >= times:
                continue
            skipped = [one.skipped for one in tries if one.skipped]
            reasons[name] = skipped[-1] if skipped else "the job came to its end before it"
            if times > 1:
                reasons[name] += f" ({times - len(tries) + len(skipped)} of {times})"
        return reasons


def json_text(report: DrillReport) -> str:
    """One JSON document in the shape of `DrillReport`: `version` first, times in seconds.

    `msgspec.json.decode(text, type=DrillReport)` reads it back.
    """
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"
