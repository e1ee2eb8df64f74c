"""State that belongs to no key on its way: acks, records, begins, restarts, damage."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
from pyspark.sql.types import LongType, StructType

from recovery.inspect.verify import verify
from snapshot.formats.object_names import data_name
from snapshot.formats.record import record_name
from snapshot.protocol.lineage import resolve
from snapshot.protocol.messages import AckReply, BeginReply, Use
from snapshot.retention.deletable import Fate, classify, view_of
from snapshot.storage.counting_store import CountingStore
from snapshot.storage.memory_store import MemoryStore
from statebackend.errors import (
    BroadcastDivergedError,
    CorruptionError,
    IncompleteEpochError,
    NotRestorableError,
    ProtocolError,
)
from statebackend.operators.operator_snapshot import HeldOperatorState
from statebackend.runtime.worker import operator_state_io as operatorstate
from statebackend.runtime.worker.operator_state_io import OperatorStateIO
from statebackend.schema.codec import codec_for
from statebackend.schema.keys.key_codec import KeyCodec
from tests.recovery.driver import JOB, Started, ack_of, begin_of, manifests_of, new_id, part_of

NUMBER = StructType().add("n", LongType())
CODEC, KEYS = codec_for(NUMBER), KeyCodec(NUMBER)
SMALL = 60  # bytes: what is larger has an object of its own


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has seen nothing."""
    monkeypatch.setattr(operatorstate, "_of_process", operatorstate.KeptBlobs())


class Worker:
    """A subtask that keeps a list and a broadcast map, and counts what it is sent."""

    def __init__(
        self, started: Started, subtask: int, store: MemoryStore | CountingStore | None = None
    ) -> None:
        self.started, self.subtask = started, subtask
        self.parallelism = started.parallelism["op"]
        self.io = OperatorStateIO(JOB, "op", subtask, self.parallelism, store or started.store)
        self.sent = 0

    def begin(self, epoch: int) -> BeginReply:
        request = msgspec.structs.replace(begin_of(epoch, self.subtask), held=self.io.held())
        reply, bodies = self.started.session.begin(request)
        self.sent = len(bodies) - len(self.io.split_off(reply, bodies))
        self.held = HeldOperatorState(self.io.read(reply))
        self.held.hold("list", "split", CODEC, None, NUMBER.json(), "")
        self.held.hold("all", "union", CODEC, None, NUMBER.json(), "")
        self.held.hold("rules", "broadcast", CODEC, KEYS, NUMBER.json(), NUMBER.json())
        self.held.gate.is_open = True
        self.reply = reply
        return reply

    def numbers(self, name: str = "list") -> list[int]:
        return [n for (n,) in self.held.states[name].get()]  # type: ignore[call-arg, union-attr]

    def rules(self) -> dict[int, int]:
        return {k: v for (k,), (v,) in self.held.states["rules"].items()}  # type: ignore[union-attr]

    def ack(self, attempt: int = 0, stage: int = 0) -> AckReply:
        reply, epoch = self.reply, self.reply.base_epoch + 1
        names = [data_name(reply.generation, epoch, new_id()) for _ in range(2)]
        parts = self.io.write(self.held.snapshot(), reply, names, reply.inline_budget_bytes)
        use = Use(stage, self.subtask)
        request = ack_of(reply.chain, part_of({}), epoch, self.subtask, attempt=attempt, use=use)
        return self.started.session.ack(
            msgspec.structs.replace(
                request,
                operator_state=parts.lists,
                broadcast=parts.maps,
                broadcast_digest=parts.maps_digest,
            )
        )


def workers(started: Started, epoch: int) -> list[Worker]:
    found = [Worker(started, subtask) for subtask in range(started.parallelism["op"])]
    for worker in found:
        worker.begin(epoch)
    return found


def run(started: Started, epoch: int, *rules: tuple[int, int]) -> list[Worker]:
    """A whole epoch; each subtask adds ten times its number, plus the epoch, to its list."""
    found = workers(started, epoch)
    for worker in found:
        worker.held.states["list"].add((10 * worker.subtask + epoch,))  # type: ignore[union-attr]
        for key, value in rules:
            worker.held.states["rules"].put((key,), (value,))  # type: ignore[union-attr]
    for worker in found:
        worker.ack()
    return found


def forget() -> None:
    operatorstate._of_process = operatorstate.KeptBlobs()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("budget", [1 << 20, SMALL])
def test_every_epoch_begins_with_what_the_one_before_ended_with(
    asynchronous: bool, budget: int
) -> None:
    started = Started(
        MemoryStore(), {"op": 2}, asynchronous=asynchronous, inline_budget_bytes=budget
    )
    run(started, 0, (1, 1))
    run(started, 1, (2, 2))
    one, other = workers(started, 2)
    assert (one.numbers(), other.numbers()) == ([0, 1], [10, 11])
    assert one.rules() == other.rules() == {1: 1, 2: 2}
    assert one.sent == other.sent == 0, "this process has it"
    forget()
    one, other = workers(started, 2)
    assert (one.numbers(), other.numbers()) == ([0, 1], [10, 11])
    # The other one is in the same process, which has the broadcast state by then.
    assert (one.sent, other.sent) == ((2, 1) if budget > SMALL else (0, 0))


@pytest.mark.parametrize("budget", [1 << 20, SMALL])
def test_a_run_begins_with_what_the_records_hold(budget: int) -> None:
    store = MemoryStore()
    started = Started(store, {"op": 2}, inline_budget_bytes=budget)
    run(started, 0, (1, 1))
    run(started, 1)
    forget()
    for first_epoch in (2, 1):  # once more from the epoch before
        one, other = workers(Started(store, {"op": 2}, first_epoch=first_epoch), first_epoch)
        assert one.numbers() == [0, 1][:first_epoch]
        assert other.numbers() == [10, 11][:first_epoch]
        assert one.rules() == other.rules() == {1: 1}


@pytest.mark.parametrize("budget", [1 << 20, SMALL])
@pytest.mark.parametrize("known", [False, True])
def test_another_parallelism_begins_with_all_of_it(budget: int, known: bool) -> None:
    store = MemoryStore()
    started = Started(store, {"op": 3}, inline_budget_bytes=budget)
    for epoch in range(2):
        run(started, epoch, (epoch, 7))
    for worker in workers(started, 2):
        worker.held.states["all"].add((worker.subtask,))  # type: ignore[union-attr]
        worker.ack()
    if not known:
        forget()
    started = Started(store, {"op": 2}, first_epoch=3, inline_budget_bytes=budget)
    one, other = workers(started, 3)
    assert (one.numbers(), other.numbers()) == ([0, 1, 10], [11, 20, 21])
    assert one.numbers("all") == other.numbers("all") == [0, 1, 2]
    assert one.rules() == other.rules() == {0: 7, 1: 7}
    for worker in (one, other):
        worker.ack()
    one, other = workers(started, 4)
    assert (one.numbers(), other.numbers()) == ([0, 1, 10], [11, 20, 21]), "and then its own"
    assert verify(store, JOB).findings == []


@pytest.mark.parametrize("budget", [1 << 20, SMALL])
@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_states_that_were_emptied_store_nothing_and_may_be_filled_again(
    budget: int, parallelism: int
) -> None:
    store = MemoryStore()
    started = Started(store, {"op": 2}, inline_budget_bytes=budget)
    run(started, 0, (1, 1))
    for worker in workers(started, 1):
        worker.held.states["list"].clear()  # type: ignore[union-attr]
        worker.held.states["rules"].remove((1,))  # type: ignore[union-attr]
        worker.ack()
    assert {one.kind for one in manifests_of(store)[-1].slices} == {"delta"}
    forget()
    started = Started(store, {"op": parallelism}, first_epoch=2, inline_budget_bytes=budget)
    for worker in workers(started, 2):
        assert (worker.numbers(), worker.rules()) == ([], {})
    run(started, 2, (7, 7))
    assert [worker.rules() for worker in workers(started, 3)] == [{7: 7}] * parallelism
    assert verify(store, JOB).findings == []


def test_lists_that_are_alike_are_found_whosever_they_were() -> None:
    store = MemoryStore()
    for worker in workers(Started(store, {"op": 4}), 0):
        worker.held.states["list"].add((7,))  # type: ignore[union-attr]
        worker.ack()
    found = workers(Started(store, {"op": 3}, first_epoch=1), 1)
    assert [worker.numbers() for worker in found] == [[7, 7], [7], [7]]


def test_the_broadcast_state_is_stored_once_for_all() -> None:
    store = MemoryStore()
    started = Started(store, {"op": 3})
    run(started, 0, (1, 1))
    record = manifests_of(store)[-1]
    kinds = [(one.kind, one.subtask) for one in record.slices if one.kind != "delta"]
    assert kinds == [("operator", 0), ("broadcast", 0), ("operator", 1), ("operator", 2)]


def test_what_is_as_it_was_keeps_its_object_and_is_not_sent_again() -> None:
    store = CountingStore(MemoryStore())
    started = Started(store, {"op": 1}, inline_budget_bytes=SMALL)
    run(started, 0, (1, 1))
    puts = store.counts["put"].requests
    for epoch in (1, 2):
        for worker in workers(started, epoch):
            worker.ack()
    forget()  # another process, which reads what it then names again
    started = Started(store, {"op": 1}, first_epoch=3, inline_budget_bytes=SMALL)
    for worker in workers(started, 3):
        worker.ack()
    assert store.counts["put"].requests == puts
    named = {
        (one.kind, one.object)
        for manifest in manifests_of(store)
        for one in manifest.slices
        if one.kind != "delta"
    }
    assert len(named) == 2
    assert all(name for _, name in named)


def test_cleaning_leaves_what_acks_and_records_name() -> None:
    store = MemoryStore()
    started = Started(store, {"op": 1}, inline_budget_bytes=SMALL)
    run(started, 0, (1, 1))
    for epoch in (1, 2, 3):
        (worker,) = workers(started, epoch)
        if epoch == 3:
            worker.held.states["list"].add((5,))  # type: ignore[union-attr]
        worker.ack()
        manifests = [
            m for m in manifests_of(store) if m.sequence >= manifests_of(store)[-1].oldest_needed
        ]
        view = view_of(
            manifests,
            {},
            kinds={},
            own_generation=started.tenure.generation,
            confirmed_epoch=epoch,
            pending=started.coordinator.run.pending_names(),
        )
        dead = {info.name for info in classify(store.list("data/"), view).of(Fate.DEAD)}
        entry = resolve(manifests)["op"].epochs[epoch]
        for ref in entry.operator_refs:
            assert ref.entry.object not in dead
            assert ref.entry.object in {info.name for info in store.list("data/")}
        assert {part.name for part in worker.reply.operator_parts} - dead


def test_objects_of_acks_are_kept_until_their_record_names_them() -> None:
    started = Started(MemoryStore(), {"op": 2}, inline_budget_bytes=SMALL)
    one, _ = workers(started, 0)
    one.held.states["rules"].put((1,), (1,))  # type: ignore[union-attr]
    one.held.states["list"].add((1,))  # type: ignore[union-attr]
    one.ack()
    pending = started.coordinator.run.pending_names()
    assert len(pending) == 2
    assert pending == {info.name for info in started.store.list("data/")}


def test_subtasks_that_come_to_different_states_make_no_record() -> None:
    started = Started(MemoryStore(), {"op": 3})
    run(started, 0, (1, 1))
    found = workers(started, 1)
    found[1].held.states["rules"].put((1,), (2,))  # type: ignore[union-attr]
    found[0].ack()
    found[1].ack()
    with pytest.raises(BroadcastDivergedError, match=r"subtask 1 to another than subtask 0"):
        found[2].ack()
    assert manifests_of(started.store)[-1].epoch == 0
    again = Worker(started, 1)
    again.begin(1)
    again.ack(attempt=1)  # an attempt that agrees
    found[2].ack(attempt=2)  # of the task that had failed
    assert manifests_of(started.store)[-1].epoch == 1
    assert workers(started, 2)[2].rules() == {1: 1}


def test_a_later_attempt_with_another_list_makes_another_record() -> None:
    started = Started(MemoryStore(), {"op": 1})
    run(started, 0)
    run(started, 1)
    (worker,) = [Worker(started, 0)]
    worker.begin(1)
    worker.held.states["list"].add((99,))  # type: ignore[union-attr]
    worker.ack(attempt=1)
    assert workers(started, 2)[0].numbers() == [0, 99]


def test_an_ack_must_carry_the_broadcast_state_that_it_speaks_of() -> None:
    started = Started(MemoryStore(), {"op": 1})
    (worker,) = workers(started, 0)
    request = ack_of(worker.reply.chain, part_of({}), 0)
    with pytest.raises(ProtocolError, match="another broadcast state"):
        started.session.ack(msgspec.structs.replace(request, broadcast_digest="ab"))


# --- damage ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["operator", "broadcast"])
@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_a_damaged_object_is_said_and_found_by_verify(kind: str, how: str) -> None:
    store = MemoryStore()
    run(Started(store, {"op": 1}, inline_budget_bytes=SMALL), 0, (1, 1))
    (entry,) = [one for one in manifests_of(store)[-1].slices if one.kind == kind]
    assert entry.object is not None
    data = bytearray(store.get(entry.object))
    data[-1] ^= 1
    store.delete([entry.object])
    if how == "flipped":
        store.put(entry.object, [bytes(data)])
    forget()
    with pytest.raises(CorruptionError, match=entry.object):
        Worker(Started(store, {"op": 1}, first_epoch=1), 0).begin(1)
    report = verify(store, JOB)
    (finding,) = report.findings
    assert (finding.object, finding.operator, finding.epoch) == (entry.object, "op", 0)
    assert "cannot be restored to epoch 0" in finding.means
    assert report.lost == {"op": [0]}


def test_damage_within_a_record_is_said() -> None:
    store = MemoryStore()
    run(Started(store, {"op": 1}), 0, (1, 1))
    record = manifests_of(store)[-1]
    (entry,) = [one for one in record.slices if one.kind == "broadcast"]
    name = record_name(record.sequence)
    data = bytearray(store.get(name))
    assert entry.offset is not None
    data[entry.offset + 3] ^= 1
    store.delete([name])
    store.put(name, [bytes(data)])
    forget()
    with pytest.raises(CorruptionError, match="broadcast"):
        Worker(Started(store, {"op": 1}, first_epoch=1), 0).begin(1)
    assert [one.epoch for one in verify(store, JOB).findings] == [0]


def test_an_epoch_that_is_cleaned_is_not_replaced_by_an_older_one() -> None:
    store = MemoryStore()
    started = Started(store, {"op": 1})
    for epoch in range(4):
        run(started, epoch)
    with pytest.raises(NotRestorableError):
        Worker(Started(store, {"op": 1}, first_epoch=9), 0).begin(9)


# --- stages that run again -----------------------------------------------------------------------


def _acked(
    started: Started, epoch: int, rules: Iterable[int], *, subtasks: Iterable[int], run: int = 0
) -> None:
    """Some subtasks ack, each with a rule of its own; of one stage where ``run`` is below ten."""
    for subtask, rule in zip(subtasks, rules, strict=True):
        worker = Worker(started, subtask)
        worker.begin(epoch)
        worker.held.states["rules"].put((1,), (rule,))  # type: ignore[union-attr]
        worker.ack(attempt=10 * run + subtask, stage=run // 10)


@pytest.mark.parametrize("again", [1, 10], ids=["the stage", "another stage"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stage_that_runs_again_with_other_rules_is_accused_of_nothing(
    asynchronous: bool, again: int
) -> None:
    started = Started(MemoryStore(), {"op": 3}, asynchronous=asynchronous)
    _acked(started, 0, [1, 1], subtasks=range(2))
    _acked(started, 0, [2, 2, 2], subtasks=(1, 0, 2), run=again)
    assert [worker.rules() for worker in workers(started, 1)] == [{1: 2}] * 3


@pytest.mark.parametrize("again", [1, 10], ids=["the stage", "another stage"])
def test_an_epoch_is_incomplete_while_runs_of_its_stage_disagree(again: int) -> None:
    started = Started(MemoryStore(), {"op": 3})
    _acked(started, 0, [1, 1], subtasks=(0, 1))
    _acked(started, 0, [2, 2], subtasks=(0, 2), run=again)
    with pytest.raises(IncompleteEpochError, match="ran again"):
        started.session.check_finished(0)
    with pytest.raises(IncompleteEpochError, match="ran again and came to another"):
        workers(started, 1)


@pytest.mark.parametrize("again", [1, 10], ids=["the stage", "another stage"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_runs_again_and_diverges_when_the_epoch_is_recorded_fails(
    asynchronous: bool, again: int
) -> None:
    """Or Spark would commit rows of both, and the next start would go on from the record."""
    started = Started(MemoryStore(), {"op": 3}, asynchronous=asynchronous)
    _acked(started, 0, [1, 1, 1], subtasks=range(3))
    for attempt in range(2):
        with pytest.raises(BroadcastDivergedError, match=r"Subtask 2 .* ran again .* recorded"):
            _acked(started, 0, [2], subtasks=[2], run=again + attempt)
    _acked(started, 0, [1], subtasks=[2], run=again + 2)
    assert [worker.rules() for worker in workers(started, 1)] == [{1: 1}] * 3


@pytest.mark.parametrize("again", [1, 10], ids=["the stage", "another stage"])
def test_subtasks_of_the_second_run_that_disagree_are_accused(again: int) -> None:
    started = Started(MemoryStore(), {"op": 3})
    _acked(started, 0, [1, 1], subtasks=(0, 1))
    with pytest.raises(BroadcastDivergedError, match="to another than subtask"):
        _acked(started, 0, [2, 2, 3], subtasks=(0, 1, 2), run=again)


def test_an_attempt_that_disagrees_is_refused_until_one_agrees() -> None:
    started = Started(MemoryStore(), {"op": 3})
    _acked(started, 0, [1, 1], subtasks=(0, 1))
    for attempt, rule in enumerate((2, 3, 4)):
        with pytest.raises(BroadcastDivergedError):
            _acked(started, 0, [rule], subtasks=[2], run=attempt)
    with pytest.raises(IncompleteEpochError, match="in brackets"):
        workers(started, 1)
    _acked(started, 0, [1], subtasks=[2], run=4)
    assert [worker.rules() for worker in workers(started, 1)] == [{1: 1}] * 3
