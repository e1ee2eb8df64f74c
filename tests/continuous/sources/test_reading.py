"""A source's subtask reads by turns, and says of its event time what holds for all its splits."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot.barriers.barrier import Idle, Watermark
from statebackend.continuous.sources.assigner import WAIT, SplitAssigner
from statebackend.continuous.sources.generated import RangeSource
from statebackend.continuous.sources.source import (
    Assignment,
    Discovery,
    Json,
    Source,
    Split,
    SplitReader,
    decode_assignment,
)
from statebackend.continuous.sources.split_reading import SplitsInHand


class Script(Source):
    """Each split is a list of batches of event times (ms); None: no rows at that moment."""

    def __init__(
        self, *, splits_end: bool = True, idle_after_s: float | None = None, delay: str = "0 s"
    ) -> None:
        super().__init__(
            "at TIMESTAMP",
            bounded=True,
            event_time="at",
            watermark_delay=delay,
            idle_after_s=idle_after_s,
        )
        self.splits_end = splits_end
        self.closed: list[str] = []

    def discover(self, state: Json | None) -> Discovery:
        return Discovery((), {}, done=True)

    def open(self, split: Split, position: Json | None) -> SplitReader:
        return _ScriptReader(self, split, 0 if position is None else position["step"])


class _ScriptReader(SplitReader):
    def __init__(self, source: Script, split: Split, step: int) -> None:
        self._source, self._split, self._step = source, split, step

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        if self.ended:
            return None
        times_ms = self._split.data["steps"][self._step]
        self._step += 1
        if times_ms is None:
            return None
        column = pa.array([at if at is None else at * 1000 for at in times_ms], pa.int64())
        return pa.record_batch({"at": column.cast(pa.timestamp("us", "UTC"))})

    @property
    def position(self) -> Json:
        return {"step": self._step}

    @property
    def ended(self) -> bool:
        return self._step == len(self._split.data["steps"])

    def close(self) -> None:
        self._source.closed.append(self._split.id)


def holding(source: Script, **splits: Sequence[Sequence[int | None] | None]) -> SplitsInHand:
    hand = SplitsInHand(source)
    for id, steps in splits.items():
        hand.take(Assignment(split=Split(id=id, data={"steps": list(steps)})), 0.0)
    return hand


def test_a_subtask_asks_for_one_split_after_another() -> None:
    source = Script()
    hand = SplitsInHand(source)
    assert hand.wants(0.0)
    hand.take(WAIT, 0.0)
    assert not hand.wants(0.05)
    assert hand.wants(0.2)
    hand.take(Assignment(split=Split(id="a", data={"steps": [[1], [2]]})), 0.2)
    assert not hand.wants(9.0)
    assert hand.read(10, 0.3) is not None
    assert hand.finished() == []
    assert hand.read(10, 0.3) is not None
    assert (hand.finished(), hand.finished(), source.closed) == (["a"], [], ["a"])
    assert hand.elements() == []
    assert hand.wants(0.3)
    assert not hand.over
    hand.take(None, 0.3)
    assert hand.over
    assert not hand.wants(9.0)


def test_splits_that_do_not_end_are_read_by_turns() -> None:
    hand = holding(Script(splits_end=False), a=[[1], [2], [3]], b=[None, [5], [6]])
    assert hand.wants(0.0)
    seen = []
    while (batch := hand.read(10, 0.0)) is not None:
        seen += [at.microsecond // 1000 for at in batch["at"].to_pylist()]
    assert seen == [1, 2, 5, 3, 6]


def test_what_is_state_is_where_to_go_on() -> None:
    hand = holding(Script(splits_end=False), a=[[1], [2]], b=[[5], [6]])
    for _ in range(3):
        hand.read(10, 0.0)
    (element,) = hand.elements()
    left = decode_assignment(*element)
    assert (left.split.id, left.position) == ("b", {"step": 1})
    hand.close()
    assert hand.elements() == []


def test_the_watermark_is_that_of_the_split_furthest_behind() -> None:
    hand = holding(Script(splits_end=False, delay="1 s"), a=[[5_000, 4_000], [9_000]], b=[[3_000]])
    hand.read(10, 0.0)
    assert hand.events(0.0) == []  # of b nothing is known yet
    hand.read(10, 0.0)  # b ends here
    assert hand.events(0.0) == [Watermark(at_ms=4_000)]
    hand.read(10, 0.0)
    assert hand.events(0.0) == [Watermark(at_ms=8_000)]
    assert hand.events(0.0) == []


def test_the_watermark_never_goes_back() -> None:
    source = Script()
    hand = holding(source, a=[[-5, None, 9_000]])
    hand.read(10, 0.0)
    assert hand.events(0.0) == [Watermark(at_ms=9_000)]
    hand.take(Assignment(split=Split(id="b", data={"steps": [[1], [2]]})), 0.0)
    hand.read(10, 0.0)
    assert hand.events(0.0) == []


def test_times_before_1970_are_rounded_down_and_nulls_say_nothing() -> None:
    hand = holding(Script(), a=[[None], [-5], [None]])
    hand.read(10, 0.0)
    assert hand.events(0.0) == []
    hand.read(10, 0.0)
    assert hand.events(0.0) == [Watermark(at_ms=-5)]


def test_an_idle_split_holds_nothing_back_and_comes_back() -> None:
    steps = [None] * 3 + [[7_000], [8_000]]
    hand = holding(
        Script(splits_end=False, idle_after_s=5), a=[[5_000], [6_000], None, None], b=steps
    )
    hand.read(10, 0.0)
    assert hand.events(1.0) == []
    hand.read(10, 6.0)
    assert hand.events(6.0) == [Watermark(at_ms=6_000)]
    assert hand.events(11.0) == [Idle(idle=True)]
    assert hand.events(12.0) == []
    while hand.read(10, 12.0) is None:
        pass
    assert hand.events(12.0) == [Idle(idle=False), Watermark(at_ms=7_000)]


def test_a_subtask_without_a_split_is_idle_after_that_time_only() -> None:
    hand = SplitsInHand(Script(idle_after_s=5))
    assert hand.events(0.0) == []
    assert hand.events(4.9) == []
    assert hand.events(5.0) == [Idle(idle=True)]
    hand.take(Assignment(split=Split(id="a", data={"steps": [[1], [2]]})), 6.0)
    assert hand.events(6.0) == [Idle(idle=False)]
    patient = SplitsInHand(Script())
    assert [patient.events(at) for at in (0.0, 1e9)] == [[], []]


def test_without_an_event_time_there_are_no_events() -> None:
    hand = SplitsInHand(RangeSource(3))
    assert hand.events(0.0) == []


class Run:
    """One run of a source: its assigner and its subtasks."""

    def __init__(
        self, source: Source, width: int, state: bytes | None, elements: list[tuple[str, str]]
    ) -> None:
        self.assigner = SplitAssigner(width, splits_end=source.splits_end)
        self.assigner.restore(state, [decode_assignment(*one) for one in elements])
        if not self.assigner.done:
            self.assigner.add(source.discover(self.assigner.discovery_state))
        self.hands = [SplitsInHand(source) for _ in range(width)]

    def step(self, index: int, max_rows: int) -> list[int]:
        hand = self.hands[index]
        if hand.wants(0.0):
            hand.take(self.assigner.request(index), -1.0)
        batch = hand.read(max_rows, 0.0)
        for id in hand.finished():
            self.assigner.finished(index, id)
        return [] if batch is None else batch["id"].to_pylist()

    def checkpoint(self) -> tuple[bytes, list[tuple[str, str]]]:
        """Subtasks take the barrier one by one; those that have, go on, for what will be lost."""
        state = self.assigner.cut(1)
        elements: list[tuple[str, str]] = []
        for index, hand in enumerate(self.hands):
            elements += hand.elements()
            self.assigner.passed(index, 1)
            for _ in range(3):
                self.step(index, 2)
        return state, elements


@pytest.mark.parametrize("end", [True, False])
@given(
    rows=st.integers(0, 60),
    splits=st.integers(1, 6),
    parallelism=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=25),
)
def test_a_source_gives_each_row_once_over_checkpoints_failures_and_rescales(
    end: bool,
    rows: int,
    splits: int,
    parallelism: list[int],
    steps: list[tuple[int, int]],
) -> None:
    source = RangeSource(rows, splits=splits)
    source.splits_end = end
    state: bytes | None = None
    elements: list[tuple[str, str]] = []
    output: list[int] = []
    for width in parallelism:
        run = Run(source, width, state, elements)
        for index, max_rows in steps:
            output += run.step(index % width, max_rows)
        state, elements = run.checkpoint()
    run = Run(source, 2, state, elements)
    while not all(hand.over for hand in run.hands):
        for index in range(2):
            output += run.step(index, 10)
    assert sorted(output) == list(range(rows))
