"""How a continuous job runs: what `ContinuousStream.start` was given, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from recovery.restarting import FixedDelay, Strategy
from snapshot.alignment import Mode
from snapshot.trigger import TriggerPolicy
from statebackend.errors import SettingError

__all__ = ["RESTART", "RunOptions"]

RESTART: Final[Strategy] = FixedDelay(3, 1.0)
"""What happens when a job fails, unless it is told otherwise."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Settings of one start; plain data, shipped to the slots.

    Attributes:
        checkpoint_interval_s, min_pause_s: see `TriggerPolicy`; None: only at the end, or when
            somebody asks.
        timeout_s: a checkpoint that takes longer is given up.
        alignment_timeout_s: a barrier that waits for longer in a subtask overtakes the rows that it
            waits for: they become a part of the checkpoint. None: never.
        mode: ``exactly_once``, or ``at_least_once``: no channel waits for another's barrier.
        tolerable_failures: so many checkpoints in a row may fail before the job does.
        restart: what happens when the job fails.
        buffer_timeout_s: rows wait so long at most for others to travel with.
        buffer_bytes: and until there are so many bytes of them.
        channel_bytes: what may be under way in one channel.
        batch_rows: what a source reads at once, at most.
        silence_s: a slot (or the driver) that is not heard of for so long is taken for gone.
        start_timeout_s: how long slots may take to be there, and to get their states.
        discover_every_s: how often a source that can find more splits is asked for them.
    """

    checkpoint_interval_s: float | None = 10.0
    min_pause_s: float = 0.0
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

    def __post_init__(self) -> None:
        """Refuse what means nothing.

        Raises:
            SettingError: naming the value.
        """
        _ = self.policy
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
        for name in (*times, "buffer_bytes", "channel_bytes", "batch_rows"):
            if not getattr(self, name) > 0:
                raise SettingError(f"{name} is {getattr(self, name)}.", todo="Give more than 0.")
        for name in ("buffer_timeout_s", "tolerable_failures"):
            if getattr(self, name) < 0:
                raise SettingError(f"{name} is {getattr(self, name)}.", todo="Give 0 or more.")

    @property
    def alignment_timeout_ms(self) -> int | None:
        """As barriers have it."""
        timeout_s = self.alignment_timeout_s
        return None if timeout_s is None else round(timeout_s * 1000)

    @property
    def policy(self) -> TriggerPolicy:
        """When checkpoints are due; one at a time."""
        return TriggerPolicy(interval_s=self.checkpoint_interval_s, min_pause_s=self.min_pause_s)
