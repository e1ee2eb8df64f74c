"""The history of a job: what it tells, what it costs, and what survives."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import msgspec
import pytest

from recovery.inspect.history import CheckpointFigures
from recovery.inspect.history_reader import HistoryReader, read_checkpoint, read_history
from recovery.inspect.verify import verify
from snapshot.formats.epoch_figures import FailedCheckpoint, decode_figures
from snapshot.formats.history_object import HISTORY_PREFIX, parse_history_name
from snapshot.formats.record import record_name
from snapshot.log.figures_book import FiguresBook
from snapshot.protocol.messages import RestoreReport
from snapshot.protocol.operators import CommitWork
from snapshot.storage import CountingStore, MemoryStore, ObjectStore
from statebackend.errors import NotRestorableError
from tests.recovery.driver import JOB, Started, ack_of, begin_of, manifests_of, part_of

SUBTASKS = 3


def report(subtask: int, source: str = "durable") -> RestoreReport:
    return RestoreReport(
        operator="op",
        subtask=subtask,
        epoch=0,
        source=source,
        local_bytes=0,
        durable_bytes=100 + subtask,
        durable_reads=1,
        seconds=float(subtask),
        host="host",
        executor="7",
        reason="the host is new",
    )


class Running:
    """A job that runs: epochs of one operator, or of several."""

    def __init__(
        self, store: ObjectStore, *, first_epoch: int = 0, subtasks: int = SUBTASKS, **more: int
    ) -> None:
        self.operators = more.pop("operators", 1)
        self.subtasks = subtasks
        uids = {("op", "other")[n]: subtasks for n in range(self.operators)}
        specs = {uid: {"max_parallelism": 64} for uid in uids}
        self.started = Started(store, uids, first_epoch=first_epoch, specs=specs, **more)  # type: ignore[arg-type]
        self.epoch = first_epoch

    def run(self, epochs: int, *, restored: bool = False) -> Running:
        for _ in range(epochs):
            for uid in self.started.parallelism:
                self.finish(uid, restored=restored)
            self.epoch += 1
            self.started.session.cleaner.drain(60)
            restored = False
        return self

    def finish(self, uid: str, *, restored: bool = False) -> None:
        session, epoch = self.started.session, self.epoch
        replies = [session.begin(begin_of(epoch, n, uid))[0] for n in range(self.subtasks)]
        for subtask, reply in enumerate(replies):
            part = part_of({b"k%d" % epoch: b"v" * (subtask + 1)})
            base = part_of({b"all": b"x"}) if reply.base_due else None
            session.ack(
                msgspec.structs.replace(
                    ack_of(reply.chain, part, epoch, subtask, uid, base=base),
                    timings_ms={"process": 10.0 * (subtask + 1), "snapshot": 1.5},
                    figures={"rows": 5, "late_rows": 1, "stored_bytes": 1000},
                    requests={"put": (1, 10)},
                    restore=report(subtask) if restored else None,
                )
            )


def history_objects(store: ObjectStore) -> list[str]:
    return [info.name for info in store.list(HISTORY_PREFIX)]


def of(store: ObjectStore, epoch: int) -> CheckpointFigures:
    found = read_checkpoint(store, JOB, epoch)
    assert found is not None
    return found


# --- what it tells -------------------------------------------------------------------------------


def test_each_checkpoint_is_there_with_its_figures_the_newest_first() -> None:
    store = MemoryStore()
    Running(store).run(4)
    found = read_history(store, JOB)
    assert [one.epoch for one in found.checkpoints] == [3, 2, 1, 0]
    assert {one.status for one in found.checkpoints} == {"complete"}
    assert (found.mode, found.newest_epoch, found.generation) == ("micro-batch", 3, 1)
    one = found.checkpoints[1]
    assert (one.rows, one.late_rows, one.state_bytes) == (15, 3, 3000)
    assert one.requests == {"put": (3, 30)}
    assert one.phases_ms["process"] == 30.0
    assert one.delta_rows == 3
    assert one.delta_bytes == one.record_bytes
    assert one.has_detail


def test_what_is_known_only_after_a_record_was_written_is_in_the_next() -> None:
    store = MemoryStore()
    Running(store).run(2)
    newest, before = read_history(store, JOB).checkpoints
    assert before.operators[0].commit_ms is not None
    assert before.durable_ms is not None
    assert newest.operators[0].commit_ms is None
    assert newest.started_ms is not None
    assert before.started_ms is not None
    assert before.started_ms <= before.durable_ms


def test_of_a_checkpoint_whose_record_is_there_each_subtask_is_known() -> None:
    store = MemoryStore()
    Running(store, operators=2).run(2)
    one = of(store, 1)
    assert [operator.uid for operator in one.operators] == ["op", "other"]
    for operator in one.operators:
        assert [s.subtask for s in operator.by_subtask] == list(range(SUBTASKS))
        assert {(s.executor, s.host) for s in operator.by_subtask} == {("executor", "host")}
        assert [s.timings_ms["process"] for s in operator.by_subtask] == [10.0, 20.0, 30.0]
        assert all(s.end_to_end_ms is not None for s in operator.by_subtask)
        assert [s.rows for s in operator.by_subtask] == [5] * SUBTASKS
        assert operator.slowest_on == "executor on host"


def test_the_slowest_is_who_took_longest_and_not_who_began_last() -> None:
    book, before = FiguresBook(), "00" * 32
    for subtask, (begun_s, acked_s) in enumerate([(0.0, 3.0), (3.0, 3.2), (3.2, 3.3)]):
        book.begun(begin_of(0, subtask), begun_s)
        book.acked(ack_of(before, part_of({b"k": b"v"}), 0, subtask), acked_s)
    acks = {n: ack_of(before, part_of({b"k": b"v"}), 0, n) for n in range(3)}
    store = MemoryStore()
    Running(store).run(1)
    manifest = manifests_of(store)[-1]
    work = CommitWork(operator="op", epoch=0, acks=acks, manifest=manifest, bodies=[], bases={})
    figures = decode_figures(book.of(work, 3.3, 3_300))
    assert figures is not None
    assert (figures.slowest, figures.acks_ms) == (0, 3_300.0)


def test_of_an_epoch_whose_begin_was_not_seen_the_record_says_so() -> None:
    """Nor is it kept for later: what comes of it counts for nothing."""
    book, acks = FiguresBook(), {n: ack_of("00" * 32, part_of({b"k": b"v"}), 0, n) for n in (0, 1)}
    store = MemoryStore()
    Running(store).run(1)
    manifest = manifests_of(store)[-1]
    work = CommitWork(operator="op", epoch=0, acks=acks, manifest=manifest, bodies=[], bases={})
    book.acked(acks[0], 0.5)
    book.gave_up(work, "the store is gone")
    book.committed(work, manifest.sequence, 0.5, 0.6)
    assert book.seen("op", 0) is None
    book.begun(begin_of(0, 1), 1.0)
    figures = decode_figures(book.of(work, 3.0, 3_000))
    assert figures is not None
    columns = figures.by_subtask()
    assert columns is not None
    assert (columns.ran_on, columns.begun_ms) == ([-1, 0], [-1, 0])


def test_an_epoch_that_some_operators_have_finished_runs() -> None:
    store = MemoryStore()
    running = Running(store, operators=2).run(2)
    running.finish("op")
    first, second, *_ = read_history(store, JOB).checkpoints
    assert (first.epoch, first.status) == (2, "running")
    assert (second.epoch, second.status) == (1, "complete")
    assert read_history(store, JOB).newest_epoch == 1


def test_restores_are_told_by_the_record_of_the_epoch_they_were_for() -> None:
    store = MemoryStore()
    Running(store, subtasks=20).run(2)
    Running(store, first_epoch=2, subtasks=20).run(2, restored=True)
    found = read_history(store, JOB)
    (restores,) = found.restores
    assert (restores.epoch, restores.generation, restores.subtasks) == (2, 2, 20)
    assert restores.by_source == {"durable": 20}
    assert restores.durable_bytes == sum(100 + n for n in range(20))
    assert [one.subtask for one in restores.slowest] == list(range(19, 3, -1))
    assert restores.slowest[0].reason == "the host is new"
    assert [one.restores for one in found.checkpoints] == [0, 20, 0, 0]


def test_checkpoints_that_failed_are_told_by_the_next_record_once_and_bounded() -> None:
    store = MemoryStore()
    running = Running(store).run(1)
    book = running.started.session.progress.figures
    for number in range(20):
        book.failed(
            FailedCheckpoint(
                epoch=1,
                checkpoint=number,
                started_ms=1000 + number,
                took_ms=5.0,
                reason="expired",
                waited_for=["op/2"],
            )
        )
    running.run(2)
    found = read_history(store, JOB).checkpoints
    failed = [one for one in found if one.status == "failed"]
    assert [one.attempt for one in failed] == list(range(19, 3, -1))
    assert failed[0].reason == "expired; it waited for op/2"
    assert [one.epoch for one in found if one.status != "failed"] == [2, 1, 0]
    assert [one.status for one in found[:3]] == ["complete", "complete", "failed"]


def test_what_a_job_went_back_from_is_discarded_until_it_is_made_anew() -> None:
    store = MemoryStore()
    Running(store).run(5)
    Running(store, first_epoch=2).run(1)
    found = read_history(store, JOB)
    assert [(one.epoch, one.status) for one in found.checkpoints] == [
        (4, "discarded"),
        (3, "discarded"),
        (2, "complete"),
        (1, "complete"),
        (0, "complete"),
    ]
    assert found.newest_epoch == 2
    assert found.checkpoints[2].repeated == 1
    assert found.checkpoints[2].generation == 2


def test_a_record_without_figures_tells_what_its_slices_say() -> None:
    store = MemoryStore()
    with mock.patch("snapshot.log.figures_book.FiguresBook.of", return_value=msgspec.UNSET):
        Running(store).run(2)
    assert b"figures" not in msgspec.json.encode(manifests_of(store)[-1])
    one = of(store, 1)
    assert one.status == "complete"
    assert one.delta_rows == 3
    assert one.phases_ms["process"] == 30.0
    assert one.started_ms is None
    assert [s.timings_ms["process"] for s in one.operators[0].by_subtask] == [10.0, 20.0, 30.0]


def test_figures_of_a_later_release_keep_no_record_from_being_read() -> None:
    store = MemoryStore()
    later = msgspec.Raw(b'{"started_ms": {"seconds": 1}}')
    with mock.patch("snapshot.log.figures_book.FiguresBook.of", return_value=later):
        Running(store).run(2)
    assert manifests_of(store)[-1].epoch == 1
    assert of(store, 1).delta_rows == 3


def test_a_job_without_a_log_has_no_history() -> None:
    with pytest.raises(NotRestorableError):
        read_history(MemoryStore(), JOB)


# --- what survives -------------------------------------------------------------------------------


EPOCHS = 150
CLEANED = {"base_every_epochs": 1, "clean_every_epochs": 1}


@pytest.fixture
def small_objects() -> Iterator[None]:
    """An object of the history holds eight epochs or more."""
    with mock.patch("snapshot.retention.history_keeping.EPOCHS_AN_OBJECT", 8):
        yield


@pytest.mark.usefixtures("small_objects")
def test_what_cleaning_deleted_is_told_by_its_summary() -> None:
    store = MemoryStore()
    running = Running(store, **CLEANED).run(30)
    assert record_name(1) not in {info.name for info in store.list("log/")}
    found = read_history(store, JOB, limit=1000)
    assert [one.epoch for one in found.checkpoints] == list(range(29, -1, -1))
    old = found.checkpoints[-1]
    assert (old.has_detail, old.status, old.rows) == (False, "complete", 15)
    assert old.operators[0].by_subtask == []
    assert old.operators[0].commit_ms is not None
    assert of(store, 0) == old
    # A killed driver's history is there after the restart.
    Running(store, first_epoch=running.epoch, **CLEANED).run(10)
    again = read_history(store, JOB, limit=1000)
    assert [one.epoch for one in again.checkpoints] == list(range(39, -1, -1))


@pytest.mark.usefixtures("small_objects")
def test_a_history_is_read_page_by_page() -> None:
    store = MemoryStore()
    Running(store, **CLEANED).run(30)
    reader, epochs, before = HistoryReader(store, JOB), [], None
    while True:
        found = reader.read(limit=7, before_epoch=before)
        epochs += [one.epoch for one in found.checkpoints]
        assert all(o.commit_ms for c in found.checkpoints if c.epoch < 29 for o in c.operators)
        if (before := found.next_before) is None:
            break
    assert epochs == list(range(29, -1, -1))


def test_a_reader_reads_nothing_twice() -> None:
    store = CountingStore(MemoryStore())
    Running(store, **CLEANED).run(10)
    reader = HistoryReader(store, JOB)
    reader.read()
    before = {verb: count.requests for verb, count in store.counts.items()}
    reader.read()
    after = {verb: count.requests for verb, count in store.counts.items()}
    assert {verb: n - before[verb] for verb, n in after.items() if n != before[verb]} == {"list": 2}


@pytest.mark.usefixtures("small_objects")
def test_claims_of_earlier_starts_are_not_read() -> None:
    """A job that is started again and again has one of each start, for ever."""
    store, asked = CountingStore(MemoryStore()), []
    for start in range(0, 160, 2):
        Running(store, first_epoch=start, **CLEANED).run(2)
        if start in (78, 158):
            before = store.counts["get_tail"].requests
            found = read_history(store, JOB, limit=1000)
            asked.append(store.counts["get_tail"].requests - before)
            assert [one.epoch for one in found.checkpoints] == list(range(start + 1, -1, -1))
    assert asked[0] == asked[1]


def test_the_newest_takeovers_are_known_and_cost_the_page_no_more_than_their_records() -> None:
    store = CountingStore(MemoryStore())
    for start in range(0, 80, 2):
        Running(store, first_epoch=start, **CLEANED).run(2)
    reader = HistoryReader(store, JOB)
    claims = reader.claims(30)
    assert [one.generation for one in claims] == list(range(40, 10, -1))
    asked = store.counts["get_tail"].requests
    reader.read()
    assert reader.claims(30) == claims
    assert store.counts["get_tail"].requests == asked


def test_an_epoch_is_durable_without_figures_that_cannot_be_written() -> None:
    store = MemoryStore()
    running = Running(store).run(1)
    reason = "cannot open '/data/\udc80'"  # a path that is not UTF-8, as Python shows it
    running.started.session.progress.figures.failed(
        FailedCheckpoint(epoch=1, started_ms=1, reason=reason)
    )
    running.run(1)
    assert [one.epoch for one in read_history(store, JOB).checkpoints] == [1, 0]


def requests_of(**settings: int) -> tuple[dict[str, int], ObjectStore]:
    store = CountingStore(MemoryStore())
    Running(store, subtasks=1, **settings).run(EPOCHS)
    return {verb: count.requests for verb, count in store.counts.items()}, store


@pytest.mark.parametrize("clean_every", [2, 32])
def test_a_history_costs_one_request_in_64_epochs(clean_every: int) -> None:
    settings = {"base_every_epochs": clean_every, "clean_every_epochs": clean_every}
    with_history, store = requests_of(**settings)
    with mock.patch("snapshot.retention.garbage_collection.keep_history") as nobody:
        nobody.side_effect = lambda store, garbage, history, *_, **__: (garbage, history)
        without, _ = requests_of(**settings)
    assert 0 < with_history["create"] - without["create"] <= EPOCHS / 64
    assert sum(with_history.values()) <= sum(without.values()) + EPOCHS / 64
    names = [parse_history_name(name) for name in history_objects(store)]
    assert 1 <= len(names) <= EPOCHS // 64
    assert all(one and one.last_epoch - one.first_epoch >= 63 for one in names)


@pytest.mark.usefixtures("small_objects")
def test_a_history_is_bounded() -> None:
    store = MemoryStore()
    with mock.patch("snapshot.retention.history_keeping.EPOCHS_KEPT", 24):
        Running(store, **CLEANED).run(70)
    assert len(history_objects(store)) <= 24 // 8 + 1
    epochs = [one.epoch for one in read_history(store, JOB, limit=1000).checkpoints]
    assert epochs == list(range(69, min(epochs) - 1, -1))
    assert 24 <= len(epochs) < 24 + 8 + 8 + 2


@pytest.mark.usefixtures("small_objects")
def test_a_damaged_object_is_reported_and_takes_nothing_else_along() -> None:
    store = MemoryStore()
    Running(store, **CLEANED).run(30)
    first, *_ = history_objects(store)
    store.put(first, [store.get(first)[:-3]])
    found = read_history(store, JOB, limit=1000)
    assert len(found.problems) == 1
    assert first in found.problems[0]
    epochs = {one.epoch for one in found.checkpoints}
    assert epochs >= set(range(10, 30))
    assert 3 not in epochs
    report = verify(store, JOB)
    assert [(one.object, one.code) for one in report.findings] == [(first, "SB3001")]
    assert "Nothing that the job needs" in report.findings[0].means
    assert report.restorable
