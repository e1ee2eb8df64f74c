"""A subtask's event time in a continuous job: what its channels say of theirs.

The watermark is the smallest over the channels that are neither idle nor ended. It never goes back:
a channel that was idle and comes back with an earlier one holds it where it is. While there is no
such channel, it stays; when all have ended, it is the end of time.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from snapshot.barriers.barrier import EndOfInput, Idle, Watermark

__all__ = ["END_MS", "START_MS", "Watermarks"]

START_MS: Final = -(2**63)
"""Before any event time: nothing is known yet."""

END_MS: Final = 2**63 - 1
"""After any event time: nothing more comes."""

_Out: TypeAlias = Watermark | Idle


class Watermarks:
    """One subtask's watermark.

    Args:
        channels: numbered from 0.
        at_ms: where it stood in the snapshot that the subtask is restored from: timers before it
            have fired. Every channel begins anew, and may lie behind it for a while.
    """

    def __init__(self, channels: int, *, at_ms: int = START_MS) -> None:
        self._of = dict.fromkeys(range(channels), START_MS)  # the channels that have not ended
        self._idle: set[int] = set()
        self._at_ms = at_ms
        self._said_idle = False

    @property
    def at_ms(self) -> int:
        """No row with an event time before it is expected; `START_MS`: nothing is known."""
        return self._at_ms

    @property
    def is_idle(self) -> bool:
        """Whether nobody holds the watermark: every channel that has not ended is idle."""
        return bool(self._of) and len(self._idle) == len(self._of)

    def take(self, channel: int, event: Watermark | Idle | EndOfInput) -> list[_Out]:
        """A channel says something of its time; what there is to send on.

        A watermark speaks for a channel that is not idle (any more). The end of a channel moves the
        watermark, but is nothing to be sent on here: `snapshot.barriers.alignment` sees it as
            well.
        """
        if channel not in self._of:
            return []
        match event:
            case Watermark(at_ms=at_ms):
                self._of[channel] = max(self._of[channel], at_ms)
                self._idle.discard(channel)
            case Idle(idle=True):
                self._idle.add(channel)
            case Idle():
                self._idle.discard(channel)
            case EndOfInput():
                del self._of[channel]
                self._idle.discard(channel)
        return self._to_send()

    def _to_send(self) -> list[_Out]:
        """Idleness last if it begins, first if it ends: a watermark says that one is not idle."""
        out: list[_Out] = []
        idle = self.is_idle
        if self._said_idle and not idle:
            out.append(Idle(idle=False))
        if not idle:
            held = [at_ms for channel, at_ms in self._of.items() if channel not in self._idle]
            lowest_ms = min(held, default=END_MS)
            # The end of time is when all have ended: one that is idle may have rows yet.
            if lowest_ms > self._at_ms and (lowest_ms < END_MS or not self._of):
                self._at_ms = lowest_ms
                out.append(Watermark(at_ms=lowest_ms))
        if idle and not self._said_idle:
            out.append(Idle(idle=True))
        self._said_idle = idle
        return out
