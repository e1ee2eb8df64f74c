"""The commit log: claims, commits and fencing, and what is read back of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import ClassVar

import pytest
from blake3 import blake3

from snapshot.formats.record import Manifest, SliceEntry, encode_record, parse_record, record_name
from snapshot.log.commit_log import Verdict, judge
from snapshot.storage import CountingStore, CreateOutcome, MemoryStore, ObjectStore
from statebackend.errors import CorruptionError, FencedError, SettingError, StoreUnreachableError
from tests.snapshot.logs import *  # noqa: F403
from tests.snapshot.logs import Failing, checkpoint, log_on

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
