"""What the page shows of a job, as plain data; the same for a running job and a stored one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from recovery.inspect.history import CheckpointFigures, History
from recovery.savepoints.savepoint_list import SavepointInfo

__all__ = [
    "JobLine",
    "JobView",
    "LookedUpValue",
    "OperatorState",
    "RunFacts",
    "SettingLine",
    "StateLine",
    "StoredFacts",
    "SummaryLine",
    "Takeover",
    "Waiting",
]


@dataclass(frozen=True, kw_only=True)
class SummaryLine:
    """One figure over many checkpoints."""

    name: str
    unit: Literal["ms", "bytes", "rows"]
    least: float
    median: float
    p95: float
    most: float


@dataclass(frozen=True, kw_only=True)
class StateLine:
    """One state of an operator."""

    operator: str
    state: str
    kind: str
    key_schema: str
    map_key_schema: str
    value_schema: str
    ttl_ms: int | None
    looked_up: bool


@dataclass(frozen=True, kw_only=True)
class OperatorState:
    """One operator's state: size, parallelism, key groups of each subtask."""

    uid: str
    parallelism: int
    max_parallelism: int
    first_epoch: int
    state_bytes: int
    dropped: bool
    key_groups: Sequence[tuple[int, int]]
    subtask_bytes: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class LookedUpValue:
    """A value of a key, as text. `found`: False: the key has none."""

    found: bool
    text: str
    where: str


@dataclass(frozen=True, kw_only=True)
class SettingLine:
    """One setting: its value, and where that came from (argument, session key, default)."""

    name: str
    key: str
    value: str
    origin: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Subtasks of an operator that the checkpoint under way waits for.

    Attributes:
        not_begun: those of them whose tasks Spark has not started yet; empty: none, or not known.
    """

    operator: str
    subtasks: Sequence[int]
    parallelism: int
    not_begun: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """How a job that runs here stands now.

    Attributes:
        active: whether it runs. starting: it is about to: its log is read, and it is claimed.
        failure: why it has ended, or commits nothing any more; empty: neither.
        continuous: a job without micro-batches.
        epoch: whose checkpoint is under way; None: none is.
        durable_epoch: the newest that is durable; None: none yet.
        running_s: since when that checkpoint is under way. durable_s: how long ago the newest one
            became durable. None: not known.
        waiting: whom it waits for; nobody: all have acked, or none is under way.
        moved_s: how long ago a subtask of it began or acked last; None: not known.
        store_out_s: how long the store has not answered; None: it answers.
        writing: whether a record is on its way to the store, and writing_s: for how long.
        input: whether there is input; None: not known.
        behind: how the job does not keep up; empty: it does.
        restarts: of a continuous job.
        interval_s: from one checkpoint of a continuous job to the next; None: by hand.
        asynchronous: whether Spark may be one batch ahead of the records.
    """

    active: bool
    starting: bool = False
    failure: str = ""
    continuous: bool = False
    epoch: int | None = None
    durable_epoch: int | None = None
    running_s: float | None = None
    durable_s: float | None = None
    waiting: Sequence[Waiting] = ()
    moved_s: float | None = None
    store_out_s: float | None = None
    writing: bool = False
    writing_s: float = 0.0
    input: bool | None = None
    behind: str = ""
    restarts: int = 0
    interval_s: float | None = None
    asynchronous: bool = False


@dataclass(frozen=True, kw_only=True)
class StoredFacts:
    """How a job stands, as its store alone shows it."""

    durable_epoch: int | None
    written_ms: int | None
    writer: str
    generation: int
    problems: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class JobLine:
    """One job in the list."""

    job: str
    epoch: int | None
    size_bytes: int | None
    written_ms: int | None
    running: bool
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Takeover:
    """A driver that took the job over. `at_ms`: None where that is not known."""

    generation: int
    writer: str
    at_ms: int | None


class JobView(Protocol):
    """One job, as the page asks for it. What it raises is a `StateBackendError`."""

    @property
    def job(self) -> str:
        """Its name."""

    @property
    def uri(self) -> str:
        """The folder of it."""

    @property
    def is_running(self) -> bool:
        """Whether it runs here."""

    def facts(self) -> RunFacts | StoredFacts:
        """How it stands now."""

    def history(self, before_epoch: int | None, limit: int) -> History:
        """Some of its checkpoints and their restores, the newest first."""

    def checkpoint(self, epoch: int) -> CheckpointFigures | None:
        """One checkpoint by subtask; None: it is not known (any more)."""

    def takeovers(self) -> list[Takeover]:
        """Drivers that took it over, the newest first."""

    def savepoints(self) -> list[SavepointInfo]:
        """Its savepoints, the newest first."""

    def operators(self) -> list[OperatorState]:
        """Its operators."""

    def states(self) -> list[StateLine]:
        """Their states."""

    def lookup(self, operator: str, state: str, key: Any) -> LookedUpValue:
        """A value of a key."""

    def settings(self) -> list[SettingLine] | None:
        """Its settings; None: nobody here knows them."""
