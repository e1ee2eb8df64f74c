"""How a continuous job runs: what `ContinuousStream.start` was given, checked."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

from recovery.decide.restart_strategy import FixedDelay, Strategy
from snapshot.barriers.alignment import Mode
from snapshot.barriers.checkpoint_trigger import TriggerPolicy
from statebackend.continuous.exchange.elements import CAPACITY_MIN_BYTES
from statebackend.errors import SettingError
from statebackend.spark_forms import bytes_of, seconds_of
from statebackend.system import warn
from statebackend.texts import did_you_mean

__all__ = ["INTERVAL", "RESTART", "RunOptions"]

INTERVAL: Final = "10 seconds"
"""From one checkpoint to the next, unless a start says otherwise."""

RESTART: Final[Strategy] = FixedDelay(3, 1.0)
"""What happens when a job fails, unless it is told otherwise."""

_CONCURRENT_MAX: Final = 8
_EARLIER: Final = "checkpoint_interval_s"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The settings of a start: what `ContinuousStream.start` takes, times in seconds.

    Attributes:
        checkpoint_interval_s: ``checkpoint_interval`` of a start, from one checkpoint to the next.
            None, and no ``max_share``: only at the end, or when somebody asks.
        min_pause_s: from the end of one checkpoint to the begin of the next, at least.
        max_share: of the time that checkpoints may take, such as 0.1.
        max_concurrent: so many checkpoints may be under way at the same time. More than 1 goes
            with neither pauses (``min_pause_s``, ``max_share``) nor ``alignment_timeout_s``.
        timeout_s: a checkpoint that takes longer is given up.
        alignment_timeout_s: a barrier that waits for longer in a subtask overtakes the rows that it
            waits for: they become a part of the checkpoint. None: never.
        mode: ``exactly_once``, or ``at_least_once``: no channel waits for another's barrier.
        tolerable_failures: so many checkpoints in a row may fail before the job does.
        restart: what happens when the job fails.
        buffer_timeout_s: rows wait so long at most for others to travel with.
        buffer_bytes: and until there are so many bytes of them.
        channel_bytes: how many bytes may be under way in one channel; at least 8,192.
        batch_rows: what a source reads at once, at most.
        silence_s: a slot (or the driver) that is not heard of for so long is taken for gone.
        start_timeout_s: how long slots may take to be there, and to get their states.
        discover_every_s: how often a source that can find more splits is asked for them.
    """

    checkpoint_interval_s: float | None = 10.0
    min_pause_s: float = 0.0
    max_share: float | None = None
    max_concurrent: int = 1
    timeout_s: float = 600.0
    alignment_timeout_s: float | None = None
    mode: Mode = "exactly_once"
    tolerable_failures: int = 0
    restart: Strategy = RESTART
    buffer_timeout_s: float = 0.01
    buffer_bytes: int = 32 << 10
    channel_bytes: int = 512 << 10
    batch_rows: int = 4096
    silence_s: float = 15.0
    start_timeout_s: float = 120.0
    discover_every_s: float = 1.0

    @classmethod
    def given(cls, **options: Any) -> RunOptions:
        """The options of a start, whose times and sizes may be texts in Spark's forms.

        Raises:
            SettingError: there is no such option, or not such a value.
        """
        interval = options.pop("checkpoint_interval", INTERVAL)
        if _EARLIER in options:
            warn(f"{_EARLIER}= is called checkpoint_interval= now.", DeprecationWarning)
            if interval != INTERVAL:
                raise SettingError(
                    f"checkpoint_interval= and {_EARLIER}= are one argument.",
                    todo="Give checkpoint_interval= only.",
                )
            interval = options.pop(_EARLIER)
        known = [field.name for field in fields(cls) if field.name != _EARLIER]
        for name, value in options.items():
            if name not in known:
                raise SettingError(
                    f"There is no setting {name!r} of a continuous job.",
                    todo=did_you_mean(name, ["checkpoint_interval", *known])
                    or "See RunOptions for those that there are.",
                )
            if value is not None and name.endswith("_s"):
                options[name] = seconds_of(name, value)
            elif name.endswith("_bytes"):
                options[name] = bytes_of(name, value)
        if interval is not None:
            interval = seconds_of("checkpoint_interval", interval)
        return cls(checkpoint_interval_s=interval, **options)

    def __post_init__(self) -> None:
        """Refuse what means nothing.

        Raises:
            SettingError: naming the value.
        """
        _ = self.policy
        self._check_concurrent()
        if self.mode not in ("exactly_once", "at_least_once"):
            raise SettingError(
                f"The mode is {self.mode!r}.", todo="Give 'exactly_once' or 'at_least_once'."
            )
        if self.alignment_timeout_s is not None:
            if not self.alignment_timeout_s >= 0:
                raise SettingError(
                    f"alignment_timeout_s is {self.alignment_timeout_s}.",
                    todo="Give 0 or more, or None.",
                )
            if self.mode != "exactly_once":
                raise SettingError(
                    "With mode='at_least_once' no channel waits for another's barrier, and there "
                    "is nothing to overtake.",
                    todo="Leave alignment_timeout_s= out.",
                )
        times = ("timeout_s", "silence_s", "start_timeout_s", "discover_every_s")
        for name in (*times, "buffer_bytes", "batch_rows"):
            if not getattr(self, name) > 0:
                raise SettingError(f"{name} is {getattr(self, name)}.", todo="Give more than 0.")
        if not self.channel_bytes >= CAPACITY_MIN_BYTES:
            raise SettingError(
                f"channel_bytes is {self.channel_bytes}.",
                todo=f"Give {CAPACITY_MIN_BYTES} or more: a channel must have room for some rows.",
            )
        for name in ("buffer_timeout_s", "tolerable_failures"):
            if getattr(self, name) < 0:
                raise SettingError(f"{name} is {getattr(self, name)}.", todo="Give 0 or more.")

    def _check_concurrent(self) -> None:
        if self.max_concurrent == 1:
            return
        if not isinstance(self.max_concurrent, int) or self.max_concurrent > _CONCURRENT_MAX:
            raise SettingError(
                f"max_concurrent is {self.max_concurrent}.",
                todo=f"Give a whole number up to {_CONCURRENT_MAX}: a later checkpoint is durable "
                "only when those before it are.",
            )
        if self.min_pause_s > 0 or self.max_share is not None:
            raise SettingError(
                f"max_concurrent={self.max_concurrent} has a checkpoint begin while others are "
                "under way, and min_pause_s or max_share only some time after the one before.",
                todo="Leave one of them out.",
            )
        if self.alignment_timeout_s is not None:
            # Such as a savepoint's, which waits for them: passed, it is given up, and both with it.
            raise SettingError(
                f"With alignment_timeout_s a barrier may overtake rows, and with max_concurrent="
                f"{self.max_concurrent} the barrier of another checkpoint may lie among them.",
                todo="Leave one of them out: checkpoints that overtake rows do not take long.",
            )

    @property
    def alignment_timeout_ms(self) -> int | None:
        """As barriers have it."""
        timeout_s = self.alignment_timeout_s
        return None if timeout_s is None else round(timeout_s * 1000)

    @property
    def policy(self) -> TriggerPolicy:
        """When checkpoints are due."""
        return TriggerPolicy(
            interval_s=self.checkpoint_interval_s,
            min_pause_s=self.min_pause_s,
            max_share=self.max_share,
            max_concurrent=self.max_concurrent,
        )
