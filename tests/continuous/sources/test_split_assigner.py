"""Every split is in a checkpoint once: here, with a subtask, or read to its end."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from statebackend.continuous.sources.generated_source import RangeSource
from statebackend.continuous.sources.source import Discovery, Split, SplitReader
from statebackend.continuous.sources.split_assigner import WAIT, SplitAssigner, Wait
from statebackend.continuous.sources.split_assignment import (
    Assignment,
    decode_assignment,
    encode_assignment,
)
from statebackend.errors import CorruptionError, ProtocolError, UnsupportedFormatError


def found(*ids: str, done: bool = False, seen: int = 0) -> Discovery:
    return Discovery(tuple(Split(id=id) for id in ids), {"seen": seen}, done)


def id_of(answer: Assignment | Wait | None) -> str:
    assert isinstance(answer, Assignment)
    return answer.split.id


def test_splits_come_in_the_order_of_their_discovery() -> None:
    assigner = SplitAssigner(2)
    assigner.add(found("b", "a"))
    assigner.add(found("c"))
    assert [id_of(assigner.request(subtask)) for subtask in (1, 0, 1)] == ["b", "a", "c"]


def test_without_a_split_one_waits_until_no_more_can_come() -> None:
    assigner = SplitAssigner(1)
    assert assigner.request(0) is WAIT
    assigner.add(found(done=True))
    assert assigner.request(0) is None


def test_after_a_cut_only_those_get_splits_that_have_passed_the_barrier() -> None:
    assigner = SplitAssigner(2)
    assigner.add(found("a", "b"))
    assigner.cut(1)
    assert assigner.request(0) is WAIT
    assigner.passed(1, 1)
    assert id_of(assigner.request(1)) == "a"
    assert assigner.request(0) is WAIT
    assigner.passed(0, 1)
    assert id_of(assigner.request(0)) == "b"


def test_whoever_waits_for_a_barrier_is_known() -> None:
    assigner = SplitAssigner(2)
    assigner.add(found("a"))
    assert not assigner.waits_for_barrier(0)
    assigner.cut(1)
    assigner.cut(2)
    assigner.passed(0, 1)
    assert assigner.waits_for_barrier(0), "the newest counts"
    assigner.passed(0, 2)
    assert [assigner.waits_for_barrier(one) for one in (0, 1)] == [False, True]
    assigner.request(0)
    assert not assigner.waits_for_barrier(1), "there is nothing to wait for"


def test_an_aborted_checkpoint_holds_nobody_back() -> None:
    assigner = SplitAssigner(1)
    assigner.add(found("a", "b"))
    assigner.cut(1)
    assigner.cut(2)
    assigner.passed(0, 1)
    assert assigner.request(0) is WAIT
    assigner.abort(2)
    assert id_of(assigner.request(0)) == "a"


def test_the_same_request_gets_the_same_split_again() -> None:
    assigner = SplitAssigner(2)
    assigner.add(found("a", "b"))
    assert id_of(assigner.request(0, 7)) == "a"
    assigner.cut(1)  # the answer was lost, and the subtask has not taken the barrier
    assert id_of(assigner.request(0, 7)) == "a"
    assert assigner.request(0, 8) is WAIT


def test_splits_that_do_not_end_are_shared_fairly() -> None:
    assigner = SplitAssigner(2, splits_end=False)
    assigner.add(found("a", "b", "c", "d"))
    assert [id_of(assigner.request(0)) for _ in range(2)] == ["a", "b"]
    assert assigner.request(0) is WAIT
    assert [id_of(assigner.request(1)) for _ in range(2)] == ["c", "d"]


def test_what_was_being_read_comes_first_after_a_restore_with_its_position() -> None:
    assigner = SplitAssigner(1)
    assigner.add(found("a", "b", done=True, seen=2))
    held = assigner.request(0)
    assert isinstance(held, Assignment)
    state = assigner.cut(4)

    again = SplitAssigner(3)
    again.restore(state, [Assignment(split=held.split, position={"row": 5})])
    assert again.discovery_state == {"seen": 2}
    assert again.request(2) == Assignment(split=Split(id="a"), position={"row": 5})
    assert id_of(again.request(0)) == "b"
    assert again.request(1) is None
    assert again.cut(1)  # numbers start anew with a run


def test_a_split_in_two_places_is_refused() -> None:
    assigner = SplitAssigner(1)
    assigner.add(found("a"))
    with pytest.raises(ProtocolError, match="'a'"):
        SplitAssigner(1).restore(assigner.cut(1), [Assignment(split=Split(id="a"))])
    with pytest.raises(ProtocolError, match="'a'"):
        assigner.add(found("a"))


@pytest.mark.parametrize("again", [1, 0])
def test_a_number_is_cut_once(again: int) -> None:
    assigner = SplitAssigner(1)
    assigner.cut(1)
    with pytest.raises(ProtocolError, match="after 1"):
        assigner.cut(again)


def test_state_of_another_kind_is_refused() -> None:
    for state in (b"", b"[]", b"{}", b'{"v":1}'):
        with pytest.raises(CorruptionError):
            SplitAssigner(1).restore(state, [])
    with pytest.raises(UnsupportedFormatError, match="9"):
        SplitAssigner(1).restore(b'{"v":9}', [])
    with pytest.raises(CorruptionError, match="'a'"):
        decode_assignment("a", "{")
    with pytest.raises(UnsupportedFormatError, match="2"):
        decode_assignment("a", '{"v":2,"data":{},"position":null}')


@given(
    st.text(min_size=1),
    st.dictionaries(st.text(), st.integers(-(2**53), 2**53)),
    st.none() | st.dictionaries(st.text(), st.text()),
)
def test_an_assignment_comes_back_from_operator_state(
    id: str, data: dict[str, int], position: dict[str, str] | None
) -> None:
    assignment = Assignment(split=Split(id=id, data=data), position=position)
    assert decode_assignment(*encode_assignment(assignment)) == assignment


# --- any interleaving --------------------------------------------------------------------------

ROWS = 3  # of each split


@dataclass
class Subtask:
    """A source's subtask, as the rules for it say."""

    held: dict[str, int] = field(default_factory=dict)  # split -> rows read
    barriers: list[int] = field(default_factory=list)  # on their way
    ended: bool = False


@dataclass
class Pending:
    """A checkpoint on its way."""

    state: bytes
    discovered: int
    read: dict[int, dict[str, int]] = field(default_factory=dict)  # by subtask: taken at barrier
    output: dict[int, list[tuple[str, int]]] = field(default_factory=dict)


class Dataflow(RuleBasedStateMachine):
    """A driver, its assigner and subtasks; messages in any order that the rules allow."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.total = 0  # splits that exist
        self.done = False
        self.kept: tuple[bytes | None, list[Assignment], list[tuple[str, int]]] = (None, [], [])
        self.begin(2)

    def begin(self, parallelism: int) -> None:
        state, positions, output = self.kept
        self.assigner = SplitAssigner(parallelism)
        self.assigner.restore(state, positions)
        self.subtasks = [Subtask() for _ in range(parallelism)]
        self.restored = list(output)
        self.output: list[list[tuple[str, int]]] = [[] for _ in range(parallelism)]
        self.checkpoints: dict[int, Pending] = {}
        self.number = 0

    @rule(more=st.integers(0, 3), last=st.booleans())
    @precondition(lambda self: not self.assigner.done)
    def discover(self, more: int, last: bool) -> None:
        # What exists is found again after a restore, from the state on.
        self.total += 0 if self.done else more
        self.done = self.done or (last and self.total > 6)
        seen = (self.assigner.discovery_state or {"seen": 0})["seen"]
        ids = [f"s{i:03d}" for i in range(seen, self.total)]
        self.assigner.add(found(*ids, done=self.done, seen=self.total))

    @rule(data=st.data())
    def request(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.subtasks) - 1))
        subtask = self.subtasks[index]
        answer = self.assigner.request(index)
        if answer is None:
            subtask.ended = True
        elif isinstance(answer, Assignment):
            assert not subtask.ended
            subtask.held[answer.split.id] = (answer.position or {"row": 0})["row"]

    @rule(data=st.data(), rows=st.integers(1, ROWS))
    def read(self, data: st.DataObject, rows: int) -> None:
        index = data.draw(st.integers(0, len(self.subtasks) - 1))
        held = self.subtasks[index].held
        if held:
            id = data.draw(st.sampled_from(sorted(held)))
            upto = min(held[id] + rows, ROWS)
            self.output[index] += [(id, row) for row in range(held[id], upto)]
            held[id] = upto
            if upto == ROWS:
                del held[id]
                self.assigner.finished(index, id)

    @rule()
    def trigger(self) -> None:
        self.number += 1
        state = self.assigner.cut(self.number)
        self.checkpoints[self.number] = Pending(state, self.total)
        for subtask in self.subtasks:
            subtask.barriers.append(self.number)

    @rule(data=st.data())
    def take_barrier(self, data: st.DataObject) -> None:
        waiting = [i for i, subtask in enumerate(self.subtasks) if subtask.barriers]
        if waiting:
            index = data.draw(st.sampled_from(waiting))
            subtask = self.subtasks[index]
            number = subtask.barriers.pop(0)
            checkpoint = self.checkpoints.get(number)
            if checkpoint is not None:
                checkpoint.read[index] = dict(subtask.held)
                checkpoint.output[index] = list(self.output[index])
            self.assigner.passed(index, number)
            if checkpoint is not None and len(checkpoint.read) == len(self.subtasks):
                self.complete(number)

    def complete(self, number: int) -> None:
        checkpoint = self.checkpoints[number]
        self.checkpoints = {n: c for n, c in self.checkpoints.items() if n > number}
        self.assigner.complete(number)
        positions = [
            Assignment(split=Split(id=id), position={"row": row})
            for held in checkpoint.read.values()
            for id, row in held.items()
        ]
        output = self.restored + [row for rows in checkpoint.output.values() for row in rows]
        self.kept = (checkpoint.state, positions, output)
        self.check_cut(checkpoint.state, positions, output)

    @staticmethod
    def check_cut(state: bytes, positions: list[Assignment], output: list[tuple[str, int]]) -> None:
        again = SplitAssigner(1)
        again.restore(state, positions)  # refuses what is in two places
        rest = {a.split.id: (a.position or {"row": 0})["row"] for a in again.pending}
        assert len(set(output)) == len(output)
        seen = (again.discovery_state or {"seen": 0})["seen"]
        for id in (f"s{i:03d}" for i in range(seen)):
            given_rows = sorted(row for split, row in output if split == id)
            assert given_rows == list(range(rest.get(id, ROWS))), id

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.checkpoints:
            number = data.draw(st.sampled_from(sorted(self.checkpoints)))
            del self.checkpoints[number]
            self.assigner.abort(number)
            for subtask in self.subtasks:
                if number in subtask.barriers and data.draw(st.booleans()):
                    subtask.barriers.remove(number)  # a cancel overtook it

    @rule(parallelism=st.integers(1, 4))
    def fail_and_restore(self, parallelism: int) -> None:
        self.begin(parallelism)

    @invariant()
    def no_split_is_with_two(self) -> None:
        ids = [id for subtask in self.subtasks for id in subtask.held]
        ids += [a.split.id for a in self.assigner.pending]
        assert len(set(ids)) == len(ids)

    def teardown(self) -> None:
        """Run to the end: every row is there once."""
        while self.done and not (self.assigner.done and not self.assigner.pending):
            if not self.assigner.done:
                self.discover_rest()
            for number in list(self.checkpoints):
                del self.checkpoints[number]
                self.assigner.abort(number)
            for index, subtask in enumerate(self.subtasks):
                answer = self.assigner.request(index)
                if isinstance(answer, Assignment):
                    subtask.held[answer.split.id] = (answer.position or {"row": 0})["row"]
        if self.done:
            rows = self.restored + [row for rows in self.output for row in rows]
            rows += [
                (id, row)
                for subtask in self.subtasks
                for id, at in subtask.held.items()
                for row in range(at, ROWS)
            ]
            everything = [(f"s{i:03d}", row) for i in range(self.total) for row in range(ROWS)]
            assert sorted(rows) == everything

    def discover_rest(self) -> None:
        seen = (self.assigner.discovery_state or {"seen": 0})["seen"]
        ids = [f"s{i:03d}" for i in range(seen, self.total)]
        self.assigner.add(found(*ids, done=True, seen=self.total))


TestDataflow = Dataflow.TestCase


class _Hand:
    """The splits that a subtask reads, in the simplest way."""

    def __init__(self, source: RangeSource) -> None:
        self._source = source
        self.reading: list[tuple[Split, SplitReader]] = []
        self.over = False

    def step(self, assigner: SplitAssigner, index: int, max_rows: int) -> list[int]:
        if not self.over and not (self._source.splits_end and self.reading):
            answer = assigner.request(index)
            if isinstance(answer, Assignment):
                reader = self._source.open(answer.split, answer.position)
                self.reading.append((answer.split, reader))
            self.over = answer is None
        out: list[int] = []
        for split, reader in list(self.reading):
            batch = reader.read(max_rows)
            out += [] if batch is None else batch["id"].to_pylist()
            if reader.ended:
                self.reading.remove((split, reader))
                assigner.finished(index, split.id)
        return out


class _Run:
    """One run of a source: its assigner and its subtasks."""

    def __init__(
        self, source: RangeSource, width: int, state: bytes | None, held: list[Assignment]
    ) -> None:
        self.assigner = SplitAssigner(width, splits_end=source.splits_end)
        self.assigner.restore(state, held)
        if not self.assigner.done:
            self.assigner.add(source.discover(self.assigner.discovery_state))
        self.hands = [_Hand(source) for _ in range(width)]

    def step(self, index: int, max_rows: int) -> list[int]:
        return self.hands[index].step(self.assigner, index, max_rows)

    def checkpoint(self) -> tuple[bytes, list[Assignment]]:
        """Subtasks take the barrier one by one; those that have, go on, for what will be lost."""
        state = self.assigner.cut(1)
        held: list[Assignment] = []
        for index, hand in enumerate(self.hands):
            held += [Assignment(split=split, position=one.position) for split, one in hand.reading]
            self.assigner.passed(index, 1)
            for _ in range(3):
                self.step(index, 2)
        return state, held


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
    held: list[Assignment] = []
    output: list[int] = []
    for width in parallelism:
        run = _Run(source, width, state, held)
        for index, max_rows in steps:
            output += run.step(index % width, max_rows)
        state, held = run.checkpoint()
    run = _Run(source, 2, state, held)
    while not all(hand.over and not hand.reading for hand in run.hands):
        for index in range(2):
            output += run.step(index, 10)
    assert sorted(output) == list(range(rows))
