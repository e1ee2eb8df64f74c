"""A source's subtask: the splits in its hands, what of them is state, and their event time.

No clock and no thread of its own: the subtask's loop calls it.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from snapshot.barriers.barrier import Idle, Watermark
from snapshot.barriers.channel_watermarks import START_MS
from statebackend.continuous.sources.assigner import Wait
from statebackend.continuous.sources.source import (
    Assignment,
    Source,
    Split,
    SplitReader,
    encode_assignment,
)

__all__ = ["SplitsInHand"]

ASK_AGAIN_S: Final = 0.1


class _Open:
    """A split being read."""

    def __init__(self, split: Split, reader: SplitReader, now_s: float) -> None:
        self.split = split
        self.reader = reader
        self.latest_ms: int | None = None  # event time, of its rows so far
        self.row_s = now_s  # when the last one came


class SplitsInHand:
    """Reads by turns what the assigner gave.

    The loop of a subtask, between two barriers::

        if hand.wants(now_s):
            hand.take(assigner.request(subtask, number), now_s)     # waits for the answer
        batch = hand.read(max_rows, now_s)                          # None: no rows now
        for split_id in hand.finished(): ...                        # assigner.finished(subtask, .)
        for event in hand.events(now_s): ...                        # after the batch, downstream

    At a barrier `elements` is the subtask's list state. When `over`, its input has ended.
    """

    def __init__(self, source: Source) -> None:
        """Without a split."""
        self._source = source
        self._turns: deque[_Open] = deque()
        self._finished: list[str] = []
        self._no_more = False
        self._ask_s: float | None = None  # not before; None: at once
        self._watermark_ms = START_MS
        self._sent_ms = START_MS
        self._said_idle = False
        self._empty_s: float | None = None  # since when there is no split

    # --- splits ---

    def wants(self, now_s: float) -> bool:
        """Whether to ask the assigner for a split."""
        if self._no_more or (self._source.splits_end and self._turns):
            return False
        return self._ask_s is None or now_s >= self._ask_s

    def take(self, answer: Assignment | Wait | None, now_s: float) -> None:
        """Take the assigner's answer; a split is opened.

        Raises:
            ConnectorError, NotReplayableError, DamagedInputError: as `Source.open`.
        """
        self._ask_s = None
        if answer is None:
            self._no_more = True
        elif isinstance(answer, Wait):
            self._ask_s = now_s + ASK_AGAIN_S
        else:
            reader = self._source.open(answer.split, answer.position)
            self._turns.append(_Open(answer.split, reader, now_s))

    @property
    def over(self) -> bool:
        """Whether all is read and nothing more will come."""
        return self._no_more and not self._turns

    def finished(self) -> list[str]:
        """The splits that ended since the last call."""
        ended, self._finished = self._finished, []
        return ended

    def elements(self) -> list[tuple[str, str]]:
        """What a checkpoint holds of the splits in hand: list state, see `encode_assignment`."""
        return [
            encode_assignment(Assignment(split=one.split, position=one.reader.position))
            for one in self._turns
        ]

    def close(self) -> None:
        """Close all readers."""
        while self._turns:
            self._turns.popleft().reader.close()

    # --- rows ---

    def read(self, max_rows: int, now_s: float) -> pa.RecordBatch | None:
        """Rows of the next split that has some; None: none has.

        Raises:
            ConnectorError, NotReplayableError, DamagedInputError: as `SplitReader.read`.
        """
        for _ in range(len(self._turns)):
            one = self._turns[0]
            batch = one.reader.read(max_rows)
            if batch is not None:
                one.row_s = now_s
                self._see(one, batch)
            self._turns.rotate(-1)
            if one.reader.ended:
                self._turns.remove(one)
                self._finished.append(one.split.id)
                one.reader.close()
            if batch is not None:
                self._advance(one, now_s)
                return batch
        return None

    # --- event time ---

    def _see(self, one: _Open, batch: pa.RecordBatch) -> None:
        if self._source.event_time is None:
            return
        latest = pc.max(batch.column(self._source.event_time)).cast(pa.int64()).as_py()
        if latest is not None:
            latest_ms = latest // 1_000 - self._source.watermark_delay_ms
            one.latest_ms = latest_ms if one.latest_ms is None else max(latest_ms, one.latest_ms)

    def _is_idle(self, since_s: float, now_s: float) -> bool:
        after_s = self._source.idle_after_s
        return after_s is not None and now_s - since_s >= after_s

    def _advance(self, read: _Open | None, now_s: float) -> int:
        """The earliest of the splits that are not idle; a split that just ended speaks still."""
        held = [one for one in self._turns if not self._is_idle(one.row_s, now_s)]
        if read is not None and read not in self._turns:
            held.append(read)
        times = [START_MS if one.latest_ms is None else one.latest_ms for one in held]
        self._watermark_ms = max(self._watermark_ms, min(times, default=START_MS))
        return self._watermark_ms

    def events(self, now_s: float) -> list[Watermark | Idle]:
        """What is new of the event time, to go downstream after the rows that were read.

        Where the source has an `idle_after_s`, the subtask is idle when each of its splits is, or
        when it has had none for so long.
        """
        if self._source.event_time is None:
            return []
        before_ms, after_ms = self._sent_ms, self._advance(None, now_s)
        self._empty_s = None if self._turns else (now_s if self._empty_s is None else self._empty_s)
        idle = all(self._is_idle(one.row_s, now_s) for one in self._turns) and (
            self._empty_s is None or self._is_idle(self._empty_s, now_s)
        )
        out: list[Watermark | Idle] = []
        if self._said_idle and not idle:
            out.append(Idle(idle=False))
        if after_ms > before_ms:
            self._sent_ms = after_ms
            out.append(Watermark(at_ms=after_ms))
            if self._said_idle and idle:
                out.append(Idle(idle=True))
        if idle and not self._said_idle:
            out.append(Idle(idle=True))
        self._said_idle = idle
        return out
