"""The commit log: claims, commits, fencing, and answers that never came."""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
from blake3 import blake3

from snapshot.formats.record import Manifest, SliceEntry, encode_record, parse_record, record_name
from snapshot.log.commit_log import CommitLog, Tenure, Verdict, judge
from snapshot.storage import CountingStore, CreateOutcome, LocalStore, MemoryStore, ObjectStore
from snapshot.storage.object_store import Buffer
from statebackend.errors import (
    CommitUnknownError,
    CorruptionError,
    FencedError,
    SettingError,
    StoreCapabilityError,
    StoreUnreachableError,
    UnsupportedFormatError,
)

_counter = itertools.count()


def new_id() -> str:
    return f"id{next(_counter)}"


def log_on(store: ObjectStore, writer: str = "a", job: str = "clicks") -> CommitLog:
    return CommitLog(store, job=job, writer=writer, new_id=new_id)


def checkpoint(
    epoch: int = 0, oldest_needed: int = 0, slices: Sequence[SliceEntry] = ()
) -> Manifest:
    return Manifest(
        kind="checkpoint",
        job="",
        job_id="",
        generation=0,
        sequence=0,
        writer="",
        write_id="",
        oldest_needed=oldest_needed,
        epoch=epoch,
        slices=list(slices),
    )


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "memory":
        return MemoryStore()
    return LocalStore(tmp_path, new_id=new_id)


class Failing(MemoryStore):
    """Does to the next create what it is told: `lose_ack`, `lose`, `interrupt`, `refuse`."""

    def __init__(self) -> None:
        super().__init__()
        self.next_create = ""
        self.before_create: Callable[[], None] = lambda: None
        self.unreadable = False

    def create(self, name: str, parts: Sequence[Buffer]) -> CreateOutcome:
        self.before_create, before = (lambda: None), self.before_create
        before()
        how, self.next_create = self.next_create, ""
        if how == "lose":
            raise StoreUnreachableError("The request was lost.")
        if how == "refuse":
            raise StoreCapabilityError("No hard links.")
        outcome = super().create(name, parts)
        if how == "lose_ack":
            raise StoreUnreachableError("The answer was lost.")
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "repeat":
            return super().create(name, parts)
        return outcome

    def get_tail(self, name: str, length: int) -> tuple[bytes, int]:
        if self.unreadable:
            raise StoreUnreachableError("The store is down.")
        return super().get_tail(name, length)


# --- the decision --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "found", "verdict"),
    [
        (CreateOutcome.CREATED, None, Verdict.COMMITTED),
        (CreateOutcome.CREATED, "own", Verdict.COMMITTED),
        (CreateOutcome.EXISTS, "own", Verdict.COMMITTED),
        (CreateOutcome.EXISTS, "other", Verdict.FENCED),
        (CreateOutcome.EXISTS, None, Verdict.UNKNOWN),
        (None, "own", Verdict.COMMITTED),
        (None, "other", Verdict.FENCED),
        (None, None, Verdict.UNKNOWN),
    ],
)
def test_an_answer_and_a_read_back_have_one_meaning(
    outcome: CreateOutcome | None, found: str | None, verdict: Verdict
) -> None:
    assert judge(outcome, found, "own") is verdict


# --- claims and commits --------------------------------------------------------------------------


def test_a_new_log_is_empty(store: ObjectStore) -> None:
    assert log_on(store).sequences() == []
    assert log_on(store).manifests() == []


def test_the_first_claim_gives_the_job_its_identity(store: ObjectStore) -> None:
    tenure = log_on(store).claim(query_id="q", run="r", stamp_ms=5, settings={"max": 128})
    assert (tenure.generation, tenure.sequence, tenure.oldest_needed) == (1, 0, 0)
    [found] = log_on(store).manifests()
    assert (found.kind, found.job, found.writer) == ("claim", "clicks", "a")
    assert (found.query_id, found.run, found.stamp_ms) == ("q", "r", 5)
    assert found.settings == {"max": 128}
    assert found.job_id == tenure.job_id != ""


def test_a_later_claim_raises_the_generation_and_keeps_the_identity(store: ObjectStore) -> None:
    first = log_on(store).claim()
    log_on(store).append(first, checkpoint())
    second = log_on(store, "b").claim()
    assert (second.generation, second.sequence) == (2, 2)
    assert second.job_id == first.job_id


def test_commits_take_one_slot_after_the_other(store: ObjectStore) -> None:
    log = log_on(store)
    tenure = log.claim()
    assert [log.append(tenure, checkpoint(epoch)) for epoch in range(3)] == [1, 2, 3]
    assert tenure.next_sequence == 4
    found = log.manifests()
    assert [m.sequence for m in found] == [0, 1, 2, 3]
    assert [m.epoch for m in found] == [-1, 0, 1, 2]
    assert {m.generation for m in found} == {1}
    assert len({m.write_id for m in found}) == 4


def test_a_commit_costs_one_request() -> None:
    store = CountingStore(MemoryStore())
    log = log_on(store)
    tenure = log.claim()
    before = store.counts
    log.append(tenure, checkpoint())
    after = store.counts
    assert after.pop("create").requests == before.pop("create").requests + 1
    assert after == before


def test_slices_come_back_from_the_record(store: ObjectStore) -> None:
    body = b"some state"
    entry = SliceEntry(
        operator="op",
        subtask=0,
        kind="base",
        epoch=0,
        key_group_start=0,
        key_group_end=1,
        attempt=0,
        rows=1,
        size_bytes=len(body),
        digest=blake3(body).hexdigest(),
        chain="",
    )
    log = log_on(store)
    sequence = log.append(log.claim(), checkpoint(slices=[entry]), [body])
    record = parse_record(store.get(record_name(sequence)), record_name(sequence))
    assert record.slice(record.manifest.slices[0]) == body


def test_an_older_tenure_is_fenced_by_the_next_claim_and_stays_so(store: ObjectStore) -> None:
    old_log, new_log = log_on(store, "old"), log_on(store, "new")
    old = old_log.claim()
    old_log.append(old, checkpoint(0))
    new = new_log.claim()
    for _ in range(2):
        with pytest.raises(FencedError, match=r"'new' \(generation 2\)"):
            old_log.append(old, checkpoint(1))
    assert isinstance(old.ended, FencedError)
    assert new_log.append(new, checkpoint(1)) == 3
    assert [(m.sequence, m.writer) for m in new_log.manifests()] == [
        (0, "old"),
        (1, "old"),
        (2, "new"),
        (3, "new"),
    ]


def test_what_is_wrong_with_a_manifest_is_said_and_ends_nothing(store: ObjectStore) -> None:
    log = log_on(store)
    tenure = log.claim()
    log.append(tenure, checkpoint(0, oldest_needed=1))
    claim = log.read(0)
    for wrong in (claim, checkpoint(1, oldest_needed=0), checkpoint(1, oldest_needed=3)):
        with pytest.raises(SettingError):
            log.append(tenure, wrong)
    with pytest.raises(SettingError):
        log.append(tenure, checkpoint(1), [b"body of nothing"])
    assert tenure.ended is None
    assert log.append(tenure, checkpoint(1, oldest_needed=2)) == 2


# --- reading -------------------------------------------------------------------------------------


def test_only_what_the_newest_record_needs_is_read(store: ObjectStore) -> None:
    log = log_on(store)
    tenure = log.claim()
    for epoch in range(4):
        log.append(tenure, checkpoint(epoch, oldest_needed=3 if epoch == 3 else 0))
    store.delete([record_name(1)])  # below the oldest needed: retention may
    store.put("log/readme.txt", [b"not a record"])
    assert log.sequences() == [0, 2, 3, 4]
    assert [m.sequence for m in log.manifests()] == [3, 4]
    assert log_on(store, "b").claim().oldest_needed == 3


def test_a_gap_in_what_is_needed_is_an_error(store: ObjectStore) -> None:
    log = log_on(store)
    tenure = log.claim()
    for epoch in range(4):
        log.append(tenure, checkpoint(epoch))
    store.delete([record_name(2)])
    with pytest.raises(CorruptionError, match=r"\[2\]"):
        log.manifests()


def test_a_reader_that_retention_overtakes_reads_again() -> None:
    class Overtaken(MemoryStore):
        overtake: Callable[[], None] = staticmethod(lambda: None)

        def get_tail(self, name: str, length: int) -> tuple[bytes, int]:
            self.overtake, overtake = (lambda: None), self.overtake
            overtake()
            return super().get_tail(name, length)

    store = Overtaken()
    log = log_on(store)
    tenure = log.claim()
    log.append(tenure, checkpoint(0, oldest_needed=1))

    def overtake() -> None:
        log.append(tenure, checkpoint(1, oldest_needed=2))
        store.delete([record_name(1)])

    store.overtake = overtake
    assert [m.sequence for m in log_on(store, "reader").manifests()] == [2]


def test_a_bit_that_flips_on_its_way_is_no_damage() -> None:
    class Flipping(MemoryStore):
        times = 1
        asked: ClassVar[Counter[str]] = Counter()

        def get_tail(self, name: str, length: int) -> tuple[bytes, int]:
            tail, total_bytes = super().get_tail(name, length)
            self.asked[name] += 1
            if self.asked[name] <= self.times:
                tail = tail[:-90] + bytes([tail[-90] ^ 4]) + tail[-89:]
            return tail, total_bytes

    store = Flipping()
    log = log_on(store)
    tenure = log.claim()
    for epoch in range(3):
        log.append(tenure, checkpoint(epoch))
    assert [m.sequence for m in log_on(store, "reader").manifests()] == [0, 1, 2, 3]
    store.asked.clear()
    assert log_on(store, "reader").read(2).sequence == 2
    assert store.asked == {record_name(2): 2}
    store.asked.clear()
    assert log_on(store, "b").claim().generation == 2
    store.asked.clear()
    store.times = 9
    with pytest.raises(CorruptionError):
        log_on(store, "reader").manifests()


def test_a_passing_failure_is_never_taken_for_an_absence() -> None:
    store = Failing()
    log = log_on(store)
    log.append(log.claim(), checkpoint())
    store.unreadable = True
    with pytest.raises(StoreUnreachableError):
        log_on(store, "reader").manifests()
    with pytest.raises(StoreUnreachableError):
        log_on(store, "b").claim()
    store.unreadable = False
    assert log.sequences() == [0, 1]


def test_records_of_another_job_or_slot_are_refused() -> None:
    store = MemoryStore()
    log_on(store).claim()
    with pytest.raises(CorruptionError, match="'clicks'"):
        log_on(store, job="views").manifests()
    with pytest.raises(CorruptionError, match="'clicks'"):
        log_on(store, job="views").claim()
    store.put(record_name(1), [store.get(record_name(0))])
    with pytest.raises(CorruptionError, match="number 0"):
        log_on(store).manifests()


def test_a_chain_whose_generation_falls_is_refused() -> None:
    store = MemoryStore()
    log_on(store).claim()
    log_on(store).claim()
    wrong = Manifest(
        kind="checkpoint",
        job="clicks",
        job_id=log_on(store).read(0).job_id,
        generation=1,
        sequence=2,
        writer="z",
        write_id="z",
        oldest_needed=0,
    )
    store.put(record_name(2), encode_record(wrong))
    with pytest.raises(CorruptionError, match="generation 1, after"):
        log_on(store).manifests()


def test_a_damaged_tip_stops_a_claim() -> None:
    store = MemoryStore()
    log_on(store).claim()
    store.put(record_name(1), [b"damaged"])
    with pytest.raises(CorruptionError):
        log_on(store).claim()


# --- answers that never came ---------------------------------------------------------------------


def test_a_lost_answer_is_recovered_by_reading_the_slot_back() -> None:
    store = Failing()
    log = log_on(store)
    for how in ("lose_ack", "repeat"):
        store.next_create = how
        tenure = log.claim()
        store.next_create = how
        sequence = log.append(tenure, checkpoint(1, oldest_needed=tenure.oldest_needed))
        assert sequence == tenure.sequence + 1
        assert log.append(tenure, checkpoint(2)) == sequence + 1
    assert [m.generation for m in log.manifests()] == [1, 1, 1, 2, 2, 2]


def test_a_request_that_never_landed_is_unknown_and_ends_the_tenure() -> None:
    store = Failing()
    log = log_on(store)
    tenure = log.claim()
    store.next_create = "lose"
    for _ in range(2):
        with pytest.raises(CommitUnknownError, match="request was lost"):
            log.append(tenure, checkpoint())
    assert log.sequences() == [0]
    assert tenure.next_sequence == 1
    again = log.claim()
    assert log.append(again, checkpoint()) == 2


def test_a_lost_answer_that_cannot_be_read_back_is_unknown_and_the_next_claim_settles_it() -> None:
    store = Failing()
    log = log_on(store)
    tenure = log.claim()
    store.next_create = "lose_ack"
    store.unreadable = True
    with pytest.raises(CommitUnknownError):
        log.append(tenure, checkpoint(7))
    store.unreadable = False
    with pytest.raises(CommitUnknownError):
        log.append(tenure, checkpoint(7))
    assert log.claim().sequence == 2
    assert [m.epoch for m in log.manifests()] == [-1, 7, -1]


def test_a_lost_request_on_a_slot_that_another_holds_is_fenced() -> None:
    store = Failing()
    log = log_on(store)
    tenure = log.claim()
    store.before_create = lambda: log_on(store, "b").claim() and None
    store.next_create = ""
    with pytest.raises(FencedError, match="'b'"):
        log.append(tenure, checkpoint())
    tenure = log.claim()
    log_on(store, "c").claim()
    store.next_create = "lose"
    with pytest.raises(FencedError, match="'c'"):
        log.append(tenure, checkpoint())


@pytest.mark.parametrize("body", [b"", b"garbage"])
def test_a_slot_that_cannot_be_read_is_unknown(body: bytes) -> None:
    store = Failing()
    log = log_on(store)
    tenure = log.claim()
    store.put(record_name(1), [body])
    with pytest.raises(CommitUnknownError, match="SB3001"):
        log.append(tenure, checkpoint())


def test_a_slot_of_a_later_release_is_unknown_and_not_ours() -> None:
    store = Failing()
    log = log_on(store)
    tenure = log.claim()
    later = bytearray(store.get(record_name(0)))
    later[-56 + 8] = 4
    store.put(record_name(1), [later])
    with pytest.raises(CommitUnknownError, match="SB3002"):
        log.append(tenure, checkpoint())
    with pytest.raises(UnsupportedFormatError):
        log.claim()


@pytest.mark.parametrize(
    ("how", "error"), [("interrupt", KeyboardInterrupt), ("refuse", StoreCapabilityError)]
)
def test_whatever_interrupts_a_commit_ends_the_tenure(how: str, error: type[BaseException]) -> None:
    store = Failing()
    log = log_on(store)
    tenure = log.claim()
    store.next_create = how
    with pytest.raises(error):
        log.append(tenure, checkpoint())
    with pytest.raises(CommitUnknownError, match="interrupted"):
        log.append(tenure, checkpoint())


def test_a_claim_whose_request_was_lost_fails_and_can_be_repeated() -> None:
    store = Failing()
    log = log_on(store)
    store.next_create = "lose"
    with pytest.raises(StoreUnreachableError, match="lost"):
        log.claim()
    assert log.claim().sequence == 0


def test_a_claim_on_a_slot_that_retention_freed_is_void() -> None:
    # b reads the tip and sleeps; a goes on and its old records, the slot b means to take among
    # them, are deleted; b wakes up. Its create succeeds, far below the tip, and fences nobody.
    store = Failing()
    log = log_on(store, "a")
    tenure = log.claim()

    def go_on() -> None:
        for epoch in range(5):
            log.append(tenure, checkpoint(epoch, oldest_needed=epoch))
        store.delete([record_name(1), record_name(2)])

    store.before_create = go_on
    claimed = log_on(store, "b").claim()
    assert log.sequences() == [0, 1, 3, 4, 5, 6]
    assert claimed.sequence == 6
    assert claimed.generation == 2
    with pytest.raises(FencedError, match="'b'"):
        log.append(tenure, checkpoint(5, oldest_needed=5))
    assert [m.sequence for m in log.manifests()] == [4, 5, 6]


def test_a_claim_gives_up_after_a_hundred_lost_races() -> None:
    class AlwaysLate(MemoryStore):
        def create(self, name: str, parts: Sequence[Buffer]) -> CreateOutcome:
            return CreateOutcome.EXISTS

    with pytest.raises(StoreUnreachableError, match="100 times"):
        log_on(AlwaysLate()).claim()


# --- races ---------------------------------------------------------------------------------------


def check_chain(found: list[Manifest], committed: dict[int, tuple[str, int]]) -> None:
    """One chain without a gap; who was told that it had committed, and only they, is in it."""
    assert [m.sequence for m in found] == list(range(len(found)))
    assert len({m.job_id for m in found}) == 1
    writer_of: dict[int, str] = {}
    for older, newer in itertools.pairwise(found):
        expected = older.generation + (newer.kind == "claim")
        assert newer.generation == expected
    for manifest in found:
        assert writer_of.setdefault(manifest.generation, manifest.writer) == manifest.writer
    in_log = {m.sequence: (m.writer, m.epoch) for m in found if m.kind == "checkpoint"}
    assert in_log == committed


def test_two_drivers_of_ten_threads_each_make_one_chain_without_a_gap(store: ObjectStore) -> None:
    logs = [log_on(store, "a"), log_on(store, "b")]
    committed: dict[int, tuple[str, int]] = {}
    start = threading.Barrier(20)
    epochs = itertools.count()
    fenced = itertools.count()
    tenures: dict[int, Tenure] = {index: log.claim() for index, log in enumerate(logs)}

    def drive(thread: int) -> None:
        index = thread % 2
        log = logs[index]
        start.wait()
        for _ in range(5):
            epoch = next(epochs)
            while True:
                tenure = tenures[index]
                try:
                    sequence = log.append(tenure, checkpoint(epoch))
                except FencedError:
                    next(fenced)
                    tenures[index] = log.claim()
                    continue
                assert sequence not in committed
                committed[sequence] = ("ab"[index], epoch)
                break

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(drive, range(20)))
    assert len(committed) == 100
    assert next(fenced) > 0
    check_chain(logs[0].manifests(), committed)


def test_twenty_drivers_that_claim_at_once_get_twenty_generations(store: ObjectStore) -> None:
    start = threading.Barrier(20)

    def claim(thread: int) -> Tenure:
        log = log_on(store, f"w{thread}")
        start.wait()
        return log.claim()

    with ThreadPoolExecutor(20) as pool:
        tenures = list(pool.map(claim, range(20)))
    assert sorted(t.generation for t in tenures) == list(range(1, 21))
    check_chain(log_on(store).manifests(), {})


def test_a_commit_cut_at_any_sync_or_link_is_whole_or_absent_and_is_settled_by_a_claim(
    tmp_path: Path,
) -> None:
    states = set()
    for step in range(1, 20):
        root = tmp_path / f"{step}"
        log = log_on(LocalStore(root, new_id=new_id))
        tenure = log.claim()
        taken = 0

        def cut(real: Callable[..., None], step: int = step) -> Callable[..., None]:
            def call(*args: object) -> None:
                nonlocal taken
                taken += 1
                if taken >= step:
                    raise OSError(5, "injected")
                real(*args)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in ("fsync", "link", "replace"):
                patch.setattr(os, name, cut(getattr(os, name)))
            try:
                log.append(tenure, checkpoint(7))
                told = "committed"
            except CommitUnknownError:
                told = "unknown"
        again = log_on(LocalStore(root, new_id=new_id))
        claimed = again.claim()
        epochs = [m.epoch for m in again.manifests()]
        assert epochs in ([-1, 7, -1], [-1, -1])
        assert claimed.sequence == len(epochs) - 1
        states.add((told, 7 in epochs))
        if taken < step:
            break
    assert states == {("unknown", False), ("unknown", True), ("committed", True)}
