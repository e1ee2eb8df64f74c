"""Whether a continuous job is started again after a failure, and after how long: pure.

A strategy is a plain setting; `Restarts` keeps what a running job needs to know of its failures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from statebackend.errors import (
    FencedError,
    ParallelismError,
    RescaleError,
    SchemaError,
    SettingError,
    SparkLostError,
    StateMismatchError,
    UnsupportedQueryError,
)
from statebackend.spark_forms import Duration, seconds_of

__all__ = [
    "ExponentialDelay",
    "FailureRate",
    "FixedDelay",
    "NoRestart",
    "Restarts",
    "Strategy",
    "is_final",
]

_FINAL: Final = (FencedError, RescaleError, SparkLostError, StateMismatchError)
_FINAL_AT_START: Final = (ParallelismError, SchemaError, SettingError, UnsupportedQueryError)


def is_final(error: BaseException, *, has_run: bool) -> bool:
    """Whether every restart would fail in the same way, so that no strategy is asked.

    Args:
        has_run: every subtask of the run had its state. So what the user gave is known to be good,
            and an error about it comes from somewhere else. Before that, the error is believed.
    """
    return isinstance(error, _FINAL) or (not has_run and isinstance(error, _FINAL_AT_START))


@dataclass(frozen=True)
class NoRestart:
    """Never start again: the first failure ends the job."""


@dataclass(frozen=True)
class FixedDelay:
    """Start again after the same delay each time, so often over the job's life.

    Attributes:
        attempts: how often; None: without limit.
        delay_s: before each; a number of seconds, or "10 seconds".

    Raises:
        SettingError: a value is negative.
    """

    attempts: int | None = None
    delay_s: Duration = 1.0

    def __post_init__(self) -> None:
        _not_negative(attempts=self.attempts, delay_s=seconds_of("delay_s", self.delay_s))


@dataclass(frozen=True, kw_only=True)
class ExponentialDelay:
    """Start again without limit, after a delay that grows with every failure.

    Attributes:
        initial_s: the first delay; a number of seconds, or "1 second", as the other times.
        max_s: the largest.
        factor: by which it grows.
        reset_after_s: a job that ran for so long since its last restart begins anew at
            ``initial_s``.
        jitter: each delay is drawn within this share of it, up or down: jobs that fell together
            do not rise together. ``max_s`` is kept nevertheless.

    Raises:
        SettingError: a value is out of its range.
    """

    initial_s: Duration = 1.0
    max_s: Duration = 60.0
    factor: float = 1.5
    reset_after_s: Duration = 3600.0
    jitter: float = 0.1

    def __post_init__(self) -> None:
        initial_s, max_s, reset_after_s = self.times_s
        _not_negative(reset_after_s=reset_after_s)
        if not 0 < initial_s <= max_s or self.factor < 1 or not 0 <= self.jitter <= 1:
            raise SettingError(
                f"Delays from {self.initial_s} s to {self.max_s} s by a factor of {self.factor}, "
                f"with a jitter of {self.jitter}.",
                todo="The first is over 0 and at most the largest, the factor is 1 or more, the "
                "jitter from 0 to 1.",
            )

    @property
    def times_s(self) -> tuple[float, float, float]:
        """``initial_s``, ``max_s`` and ``reset_after_s`` in seconds."""
        return (
            seconds_of("initial_s", self.initial_s),
            seconds_of("max_s", self.max_s),
            seconds_of("reset_after_s", self.reset_after_s),
        )


@dataclass(frozen=True)
class FailureRate:
    """Start again while there were at most ``failures`` within the last ``per_s`` seconds.

    Attributes:
        failures: so many are borne.
        per_s: within so many seconds, or "10 minutes".
        delay_s: before each start.

    Raises:
        SettingError: a value is negative.
    """

    failures: int
    per_s: Duration
    delay_s: Duration = 1.0

    def __post_init__(self) -> None:
        times_s = {name: seconds_of(name, getattr(self, name)) for name in ("per_s", "delay_s")}
        _not_negative(failures=self.failures, **times_s)


Strategy: TypeAlias = NoRestart | FixedDelay | ExponentialDelay | FailureRate


@dataclass(frozen=True)
class Restarts:
    """A job's failures, as far as its strategy asks for them; a new one comes of every failure.

    Attributes:
        count: failures, since the delay was last reset.
        base_s: the last delay without its jitter.
        running_s: when the job was to run again after the last failure.
        recent_s: failures within the strategy's time.
    """

    strategy: Strategy
    count: int = 0
    base_s: float = 0.0
    running_s: float | None = None
    recent_s: tuple[float, ...] = ()

    def failed(self, now_s: float, drawn: float = 0.5) -> tuple[Restarts, float | None]:
        """The job has failed: what is known now, and after how long it starts again.

        Args:
            now_s: a clock that does not go back. drawn: at random from [0, 1), for the jitter.

        Returns:
            The delay in seconds; None: it is given up.
        """
        match self.strategy:
            case NoRestart():
                return self._with(None, now_s)
            case FixedDelay(attempts, delay):
                left = attempts is None or self.count < attempts
                return self._with(seconds_of("delay_s", delay) if left else None, now_s)
            case FailureRate(failures, per, delay):
                within_s = seconds_of("per_s", per)
                recent_s = (*(s for s in self.recent_s if now_s - s < within_s), now_s)
                delay_s = seconds_of("delay_s", delay) if len(recent_s) <= failures else None
                return self._with(delay_s, now_s, recent_s=recent_s)
            case ExponentialDelay():
                return self._exponential(self.strategy, now_s, drawn)

    def _exponential(
        self, strategy: ExponentialDelay, now_s: float, drawn: float
    ) -> tuple[Restarts, float | None]:
        initial_s, max_s, reset_after_s = strategy.times_s
        ran_long = self.running_s is not None and now_s - self.running_s >= reset_after_s
        if ran_long or not self.count:
            count, base_s = 0, initial_s
        else:
            count, base_s = self.count, min(max_s, self.base_s * strategy.factor)
        delay_s = min(max_s, base_s * (1 + strategy.jitter * (2 * drawn - 1)))
        return Restarts(strategy, count + 1, base_s, now_s + delay_s), delay_s

    def _with(
        self, delay_s: float | None, now_s: float, recent_s: tuple[float, ...] = ()
    ) -> tuple[Restarts, float | None]:
        running_s = None if delay_s is None else now_s + delay_s
        after = Restarts(self.strategy, self.count + 1, delay_s or 0.0, running_s, recent_s)
        return after, delay_s


def _not_negative(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and value < 0:
            raise SettingError(f"{name} is {value}.", todo="Give 0 or more.")
