"""When a subtask takes its snapshot: barriers over its input channels, as a state machine.

It is told what the subtask takes out of its channels (`data`, `event`), what has arrived in them
and is not taken out yet (`announced`), what the coordinator says beside them (`triggered`,
`aborted`) and that time passes (`tick`); it answers with actions, to be done in their order before
anything else is taken. It knows no rows, no clock and no thread.

*Exactly once*: a channel that has brought the barrier is blocked until all have. Rows before it are
in the snapshot, rows behind it are not, in every channel.

*At least once*: nothing is blocked. Rows behind a barrier that came early are in the snapshot, and
come again after a restore.

*Unaligned*: once alignment has taken `Barrier.alignment_timeout_ms` (an exactly-once subtask, a
barrier of kind ``checkpoint``), the snapshot is taken at once, the barrier goes on with a timeout
of 0, and the rows that it overtook become a part of the snapshot, for each channel by itself:

* the barrier lies in the channel (or its end does): `Overtake`, a copy of what is ahead of it;
* it has not arrived: every row taken out of it until then (`Keep`), and `Overtake` when it has.

When no channel is left, the part is whole (`Captured`), and only then may it be acked. What was
captured is delivered all the same. On restore it is put back in front of its channel, ahead of
everything that the sender sends anew; `snapshot.barriers.pending_checkpoints.check_in_flight` says
where.

A channel keeps its order, so a barrier that is overtaken by a newer one in a channel will never
come there: the older attempt is given up (`Why.NEWER`). A channel that has ended counts as aligned.
Once all have ended no barrier comes any more, and the coordinator's own word counts (`triggered`):
it tells every subtask, and those that still have an open channel wait for the barrier in it. A
source is a subtask without channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import msgspec

from snapshot.barriers.alignment_actions import (
    Abort,
    Action,
    Block,
    Captured,
    Figures,
    Forward,
    Keep,
    Overtake,
    Snapshot,
    Unblock,
    Why,
)
from snapshot.barriers.barrier import Barrier, Cancel, EndOfInput
from statebackend.errors import ProtocolError

__all__ = [
    "Abort",
    "Action",
    "Alignment",
    "Block",
    "Captured",
    "Figures",
    "Forward",
    "Keep",
    "Mode",
    "Overtake",
    "Snapshot",
    "Unblock",
    "Why",
]

Mode: TypeAlias = Literal["exactly_once", "at_least_once"]

_TODO: Final = "This is a fault in the task's loop: report it with the job's log."


@dataclass
class _Attempt:
    """An attempt that was seen and is not settled.

    Attributes:
        missing: open channels whose barrier was not taken out yet.
        open: after an unaligned snapshot: channels of which not all is copied.
    """

    barrier: Barrier
    first_s: float
    missing: set[int]
    processed: int = 0
    persisted: int = 0
    open: set[int] = field(default_factory=set)

    def figures(self, now_s: float) -> Figures:
        delay_s = self.first_s - self.barrier.stamp_ms / 1000
        return Figures(
            start_delay_s=max(0.0, delay_s),
            duration_s=max(0.0, now_s - self.first_s),
            bytes_processed=self.processed,
            bytes_persisted=self.persisted,
        )


class Alignment:
    """One subtask's barriers.

    Args:
        channels: numbered from 0; 0 of them for a source.
        in_order: channels that no barrier overtakes in: the snapshot waits for theirs.
        now_s (of every method): the subtask's clock in seconds since 1970. Only the start delay
            compares it with another machine's.
    """

    def __init__(
        self, channels: int, *, mode: Mode = "exactly_once", in_order: Iterable[int] = ()
    ) -> None:
        self._exactly_once = mode == "exactly_once"
        self._in_order = frozenset(in_order)
        self._live = set(range(channels))  # have not ended
        self._ending: set[int] = set()  # the end has arrived, and is not taken out
        self._blocked: set[int] = set()
        # By channel: what arrived and is not taken out, with the bytes ahead of it.
        self._arrived: list[dict[int, int]] = [{} for _ in range(channels)]
        self._taken = [0] * channels  # by channel: the highest attempt whose event was taken out
        self._aligning: dict[int, _Attempt] = {}  # ascending
        self._capturing: dict[int, _Attempt] = {}
        self._last = 0  # the highest attempt that was settled; older ones are, too
        self._cancelled: set[int] = set()  # above it, by the coordinator's word
        # Barriers that the coordinator has named, for when no channel is left to bring them.
        self._from_coordinator: dict[int, Barrier] = {}

    # --- what is seen --------------------------------------------------------------------------

    @property
    def blocked(self) -> frozenset[int]:
        """Channels that nothing may be taken out of."""
        return frozenset(self._blocked)

    @property
    def ended(self) -> bool:
        """Whether every channel has ended; True for a source, which knows better itself."""
        return not self._live

    @property
    def next_deadline_s(self) -> float | None:
        """When `tick` will have something to do; None: not before something else happens."""
        if not self._exactly_once or not self._aligning:
            return None
        # Only the oldest: a newer snapshot must not be taken before an older one.
        attempt = next(iter(self._aligning.values()))
        timeout_ms = attempt.barrier.alignment_timeout_ms
        if timeout_ms is None or attempt.barrier.kind != "checkpoint":
            return None
        if self.waits_in_order(attempt.barrier.checkpoint):
            return None
        return attempt.first_s + timeout_ms / 1000

    def waits_in_order(self, checkpoint: int) -> bool:
        """Whether a channel that no barrier overtakes in is yet to bring an attempt's."""
        attempt = self._aligning.get(checkpoint) or self._capturing.get(checkpoint)
        missing = self._live if attempt is None else attempt.missing
        return not self._in_order.isdisjoint(missing)

    # --- what happens --------------------------------------------------------------------------

    def data(self, channel: int, size_bytes: int, now_s: float) -> list[Action]:
        """A row or batch was taken out of a channel.

        Raises:
            ProtocolError: the channel is blocked, or has ended.
        """
        self._check(channel)
        arrived = self._arrived[channel]
        for number, ahead_bytes in arrived.items():
            arrived[number] = max(0, ahead_bytes - size_bytes)
        for attempt in self._aligning.values():
            attempt.processed += size_bytes
        actions: list[Action] = []
        for number, attempt in self._capturing.items():
            attempt.processed += size_bytes
            if channel in attempt.open:
                attempt.persisted += size_bytes
                actions.append(Keep(number, channel))
        return actions

    def event(
        self, channel: int, event: Barrier | Cancel | EndOfInput, now_s: float
    ) -> list[Action]:
        """An event was taken out of a channel. Raises as `data`."""
        self._check(channel)
        match event:
            case Barrier():
                return self._barrier(channel, event, now_s)
            case Cancel():
                number = event.checkpoint
                actions = self._passed(channel, number)
                if self._is_new(number) or number in self._capturing:
                    actions += self._give_up(number, Why.CANCELLED)
                return actions
            case EndOfInput():
                return self._end(channel, now_s)

    def announced(
        self,
        channel: int,
        event: Barrier | EndOfInput,
        ahead: int,
        now_s: float,
        *,
        ahead_bytes: int = 0,
    ) -> list[Action]:
        """An event has arrived in a channel and lies there behind rows.

        It may be told late, when the event was taken out already: then nothing is done. A channel
        that never announces is aligned all the same, but never overtaken in.

        Args:
            ahead: how many rows or batches lie before it. ahead_bytes: their size, for figures.
        """
        if channel not in self._live:
            return []
        if isinstance(event, EndOfInput):
            self._ending.add(channel)
            return self._overtake_in(channel, list(self._capturing), ahead_bytes, now_s)
        number = event.checkpoint
        if number <= self._taken[channel] or number in self._arrived[channel]:
            return []
        actions = self._never(channel, number)
        self._arrived[channel][number] = ahead_bytes if ahead else 0
        actions += self._overtake_in(channel, [number], ahead_bytes, now_s)
        if self._is_new(number):
            actions += self._begin(event, now_s)
        return actions + self.tick(now_s)

    def triggered(self, barrier: Barrier, now_s: float) -> list[Action]:
        """The coordinator has begun an attempt; it says so to every subtask.

        In the order of its attempts: an older one that comes behind a newer one is not taken any
        more, and expires. One that does not come at all expires just so.
        """
        if not self._is_new(barrier.checkpoint):
            return []
        if self._live:
            self._from_coordinator[barrier.checkpoint] = barrier
            return []
        actions = self._begin(barrier, now_s)
        attempt = self._aligning.get(barrier.checkpoint)
        return actions if attempt is None else actions + self._snapshot(attempt, now_s)

    def aborted(self, checkpoint: int) -> list[Action]:
        """The coordinator has given an attempt up, whether it was seen here or not."""
        if not self._is_new(checkpoint) and checkpoint not in self._capturing:
            return []
        if checkpoint > self._last:
            self._cancelled.add(checkpoint)  # not `_last`: an older one may be on its way yet
        return self._give_up(checkpoint, Why.CANCELLED)

    def tick(self, now_s: float) -> list[Action]:
        """Time has passed."""
        actions: list[Action] = []
        while (deadline_s := self.next_deadline_s) is not None and deadline_s <= now_s:
            actions += self._overtake(next(iter(self._aligning.values())), now_s)
        return actions

    # --- how -----------------------------------------------------------------------------------

    def _check(self, channel: int) -> None:
        if channel in self._blocked:
            raise ProtocolError(f"Channel {channel} is blocked, and was read.", todo=_TODO)
        if channel not in self._live:
            raise ProtocolError(f"Channel {channel} has ended, and was read.", todo=_TODO)

    def _is_new(self, number: int) -> bool:
        if number in self._aligning:
            return True
        return number > self._last and number not in self._cancelled

    def _begin(self, barrier: Barrier, now_s: float) -> list[Action]:
        """Begin an attempt with the first barrier that is seen of it."""
        number = barrier.checkpoint
        if number in self._aligning:
            return []
        self._aligning[number] = _Attempt(barrier, now_s, set(self._live))
        if number < max(self._aligning):
            self._aligning = dict(sorted(self._aligning.items()))
        return self._give_up(number, Why.NEWER) if self._was_skipped(number) else []

    def _was_skipped(self, number: int) -> bool:
        """Whether a channel has brought a newer barrier in this one's place."""
        if any(taken > number for taken in self._taken):
            return True
        return any(a and number not in a and max(a) > number for a in self._arrived)

    def _barrier(self, channel: int, barrier: Barrier, now_s: float) -> list[Action]:
        number = barrier.checkpoint
        repeated = number <= self._taken[channel]
        actions = self._passed(channel, number)
        if repeated:
            return actions
        actions += self._close(channel, [number], now_s)
        if self._is_new(number):
            actions += self._begin(barrier, now_s)
        attempt = self._aligning.get(number)
        if attempt is None:
            return actions
        attempt.missing.discard(channel)
        if not attempt.missing:
            return actions + self._snapshot(attempt, now_s)
        if self._exactly_once:
            self._blocked.add(channel)
            actions.append(Block(channel))
        return actions + self.tick(now_s)

    def _end(self, channel: int, now_s: float) -> list[Action]:
        self._live.discard(channel)
        self._ending.discard(channel)
        actions = self._close(channel, list(self._capturing), now_s)
        for attempt in list(self._aligning.values()):
            attempt.missing.discard(channel)
            if not attempt.missing:
                actions += self._snapshot(attempt, now_s)
        if not self._live:
            for _, barrier in sorted(self._from_coordinator.items()):
                actions += self.triggered(barrier, now_s)
        return actions

    def _passed(self, channel: int, number: int) -> list[Action]:
        """The channel has come to ``number``: what lay before it has come, or never will."""
        arrived = self._arrived[channel]
        for older in [n for n in arrived if n <= number]:
            del arrived[older]
        self._taken[channel] = max(self._taken[channel], number)
        return self._never(channel, number)

    def _never(self, channel: int, number: int) -> list[Action]:
        """Give up the older attempts whose barrier the channel will not bring any more."""
        arrived = self._arrived[channel]
        lost = [
            older
            for older, attempt in self._aligning.items()
            if older < number and channel in attempt.missing and older not in arrived
        ]
        lost += [n for n, a in self._capturing.items() if n < number and channel in a.open]
        return [action for older in sorted(lost) for action in self._give_up(older, Why.NEWER)]

    def _give_up(self, number: int, why: Why) -> list[Action]:
        attempt = self._aligning.get(number)
        self._capturing.pop(number, None)
        unblocked = self._settle(attempt) if attempt is not None else []
        self._settled(number)
        return [Abort(number, why), Forward(Cancel(checkpoint=number)), *unblocked]

    def _settle(self, attempt: _Attempt) -> list[Action]:
        """The attempt holds no channel any more."""
        number = attempt.barrier.checkpoint
        del self._aligning[number]
        self._settled(number)
        # Whatever is blocked, is so for this one: behind a blocked channel's barrier nothing newer
        # can have been taken out.
        blocked = [c for c in sorted(self._blocked) if self._taken[c] == number]
        self._blocked.difference_update(blocked)
        return [Unblock(channel) for channel in blocked]

    def _settled(self, number: int) -> None:
        if number not in self._cancelled:
            self._last = max(self._last, number)
            self._cancelled = {n for n in self._cancelled if n > self._last}
            self._from_coordinator = {
                n: one for n, one in self._from_coordinator.items() if n > self._last
            }

    def _snapshot(self, attempt: _Attempt, now_s: float) -> list[Action]:
        """Every channel has brought the barrier."""
        barrier = attempt.barrier
        taken = Snapshot(barrier.checkpoint, barrier, False, attempt.figures(now_s))
        return [taken, Forward(barrier), *self._settle(attempt)]

    def _overtake(self, attempt: _Attempt, now_s: float) -> list[Action]:
        """Take the snapshot before every channel has brought the barrier.

        Rows of the missing channels become a part of it: at once where the barrier has arrived, and
        as they come in the others.
        """
        barrier = attempt.barrier
        number = barrier.checkpoint
        unblocked = self._settle(attempt)
        taken = Snapshot(number, barrier, True, attempt.figures(now_s))
        self._capturing[number] = attempt
        attempt.open = set(attempt.missing)
        return [
            taken,
            Forward(msgspec.structs.replace(barrier, alignment_timeout_ms=0)),
            *self._copy_arrived(attempt),
            *self._whole(number, now_s),
            *unblocked,
        ]

    def _copy_arrived(self, attempt: _Attempt) -> list[Action]:
        """Copy what lies ahead of the barrier, or of the end, in the channels that have it."""
        number = attempt.barrier.checkpoint
        ahead_bytes = {
            channel: self._arrived[channel].get(number, 0)
            for channel in sorted(attempt.open)
            if number in self._arrived[channel] or channel in self._ending
        }
        if not ahead_bytes:
            return []
        attempt.persisted += sum(ahead_bytes.values())
        attempt.open.difference_update(ahead_bytes)
        return [Overtake(number, tuple(ahead_bytes))]

    def _overtake_in(
        self, channel: int, numbers: list[int], ahead_bytes: int, now_s: float
    ) -> list[Action]:
        """What captures were waiting for has arrived in a channel."""
        actions: list[Action] = []
        for number in numbers:
            attempt = self._capturing.get(number)
            if attempt is None or channel not in attempt.open:
                continue
            attempt.persisted += ahead_bytes
            actions.append(Overtake(number, (channel,)))
            actions += self._close(channel, [number], now_s)
        return actions

    def _close(self, channel: int, numbers: list[int], now_s: float) -> list[Action]:
        """Nothing more of a channel belongs to these captures."""
        actions: list[Action] = []
        for number in numbers:
            attempt = self._capturing.get(number)
            if attempt is not None:
                attempt.open.discard(channel)
                actions += self._whole(number, now_s)
        return actions

    def _whole(self, number: int, now_s: float) -> list[Action]:
        attempt = self._capturing[number]
        if attempt.open:
            return []
        del self._capturing[number]
        return [Captured(number, attempt.figures(now_s))]
