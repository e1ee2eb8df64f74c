"""A commit whose answer never came, and drivers that claim and commit at once."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from snapshot.formats.record import Manifest, record_name
from snapshot.log.commit_log import Tenure
from snapshot.storage import CreateOutcome, LocalStore, MemoryStore, ObjectStore
from snapshot.storage.object_store import Buffer
from statebackend.errors import (
    CommitUnknownError,
    FencedError,
    StoreCapabilityError,
    StoreUnreachableError,
    UnsupportedFormatError,
)
from tests.snapshot.logs import *  # noqa: F403
from tests.snapshot.logs import Failing, checkpoint, log_on, new_id

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
