"""Cleaning a job's folder: what it costs, what it leaves, and what a crash in it leaves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from recovery.inspect.verify import verify
from snapshot.formats.object_names import base_file_name, data_name
from snapshot.formats.record import record_name
from snapshot.log.commit_log import CommitLog
from snapshot.retention.deletable import RecordKind, View, view_of
from snapshot.retention.garbage_collection import (
    ALL_PREFIXES,
    LOOK_AGAIN,
    CleanReport,
    Tally,
    clean,
    outside_view,
    read_indexes,
)
from snapshot.storage import CreateOutcome, LocalStore, MemoryStore, ObjectStore
from statebackend.errors import CorruptionError, NotRestorableError, StoreUnreachableError
from tests.cli.folder import JOB, Folder, new_id


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "memory":
        return MemoryStore()
    return LocalStore(tmp_path, new_id=new_id)


def names(store: ObjectStore) -> set[str]:
    return {info.name for info in store.list("")}


def reader(store: ObjectStore) -> CommitLog:
    return CommitLog(store, job=JOB, writer="x", new_id=new_id)


def outside(folder: Folder, *, dry_run: bool = False) -> CleanReport:
    """As the command line does it."""
    return clean(folder.store, lambda: outside_view(folder.store, folder.log), dry_run=dry_run)


def driver_view(folder: Folder, kinds: dict[int, RecordKind] | None = None) -> View:
    """As the running driver gives it, between two epochs."""
    manifests = folder.log.manifests()
    return view_of(
        manifests,
        read_indexes(folder.store, manifests),
        kinds=kinds or {},
        own_generation=folder.tenure.generation,
        confirmed_epoch=folder.next_epoch,
    )


def busy(store: ObjectStore) -> Folder:
    """A job with garbage of every kind, in two generations."""
    folder = Folder(store).epochs(3, own=True).epochs(1, base="files", own=True)
    store.put(data_name(1, 3, "stray"), [b"of a lost attempt"])
    store.put(base_file_name(1, "lapsed", "1.sst"), [b"of a lost upload"])
    folder.claim("host:2").epochs(2, base="files", own=True)
    store.put(data_name(2, 4, "stray"), [b"of a lost attempt"])
    store.put(base_file_name(2, "lapsed", "1.sst"), [b"of a lost upload"])
    return folder


def test_a_dry_run_deletes_nothing_and_says_what_would_go(store: ObjectStore) -> None:
    folder = busy(store)
    before = names(store)
    report = outside(folder, dry_run=True)
    assert names(store) == before
    assert report.dry_run
    assert set(report.removed) == {"records", "data", "bases"}
    done = outside(folder)
    assert done.removed == report.removed
    assert done.removed_bytes > 0
    gone = sum(tally.objects for tally in report.removed.values())
    assert len(before) - len(names(store)) == gone


def test_an_outsider_keeps_all_that_the_driver_may_still_name(store: ObjectStore) -> None:
    folder = busy(store)
    report = outside(folder)
    assert data_name(1, 3, "stray") not in names(store)
    assert base_file_name(1, "lapsed", "1.sst") not in names(store)
    assert {data_name(2, 4, "stray"), base_file_name(2, "lapsed", "1.sst")} <= names(store)
    assert report.drivers["data"].objects > 0
    folder.check()
    assert verify(store, JOB).ok
    folder.epochs(3, base="files").check()


def test_a_driver_leaves_only_what_is_needed(store: ObjectStore) -> None:
    folder = busy(store)
    report = clean(store, lambda: driver_view(folder))
    assert report.drivers == {}
    manifests = folder.log.manifests()
    needed = view_of(manifests, read_indexes(store, manifests), kinds={}).named
    records = {record_name(m.sequence) for m in manifests} | {record_name(s) for s in (0, 5)}
    assert names(store) == needed | records
    assert report.cleaned_below == manifests[-1].oldest_needed
    folder.check()
    assert outside(folder).removed == {}


def test_a_driver_reads_only_records_whose_kind_it_does_not_know(store: ObjectStore) -> None:
    folder = busy(store)
    kinds: dict[int, RecordKind] = {m.sequence: m.kind for m in folder.log.manifests()}
    kinds |= {0: "claim", 1: "checkpoint"}
    view = driver_view(folder, kinds)
    unknown = set(range(view.oldest_needed)) - set(kinds)
    report = clean(store, lambda: view)
    assert report.requests.get("get_tail", 0) == len(unknown)
    assert report.requests["list"] == 3
    assert report.requests["delete"] == 3
    again = clean(store, lambda: driver_view(folder, report.kinds))
    assert again.requests == {"list": 3}
    assert set(report.kinds.values()) == {"claim"}


def test_a_driver_that_remembers_reads_no_record_at_all(store: ObjectStore) -> None:
    folder = Folder(store)
    kinds: dict[int, RecordKind] = {0: "claim"}
    for _ in range(4):
        for _ in range(2):
            folder.epoch(base="base")
            kinds[folder.tenure.next_sequence - 1] = "checkpoint"
        report = clean(store, lambda: driver_view(folder, kinds))  # noqa: B023
        assert "get_tail" not in report.requests
        kinds = report.remembered(kinds)
    assert folder.tenure.next_sequence == 9
    assert len(kinds) == 1 + 9 - report.oldest_needed
    assert set(names(store)) == {record_name(s) for s in kinds}
    folder.check()


def many_claims(store: ObjectStore) -> tuple[Folder, CleanReport]:
    """A job that was taken over again and again, and cleaned by the last driver."""
    folder = Folder(store).epochs(2)
    for _ in range(2 * LOOK_AGAIN):
        folder.claim()
    folder.epochs(2).epochs(2, base="base")
    report = clean(store, lambda: driver_view(folder))
    folder.tenure.cleaned_below = report.cleaned_below
    folder.epochs(1, base="base")
    assert driver_view(folder).cleaned_below > 2 * LOOK_AGAIN
    return folder, report


def test_of_what_a_tip_says_was_cleaned_a_new_driver_reads_little(store: ObjectStore) -> None:
    folder, _ = many_claims(store)
    view = driver_view(folder)
    report = clean(store, lambda: view)
    not_cleaned = view.oldest_needed - view.cleaned_below
    assert report.requests["get_tail"] == not_cleaned + LOOK_AGAIN
    assert report.cleaned_below == view.oldest_needed
    again = clean(store, lambda: replace(view, kinds=report.kinds))
    # Without times in the listing any of them may be the late one: the next ones, then.
    assert again.requests.get("get_tail", 0) == (LOOK_AGAIN if untimed(store) else 0)


def untimed(store: ObjectStore) -> bool:
    return isinstance(store, MemoryStore)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_record_that_lands_late_below_what_was_cleaned_is_found_and_removed(
    store: ObjectStore, restarted: bool
) -> None:
    other = Folder(MemoryStore()).epochs(1)
    folder, report = many_claims(store)
    before = names(store)
    late = record_name(1)  # an epoch of the first driver's: its first PUT was held until now
    assert late not in before
    assert store.create(late, [other.store.get(late)]) is CreateOutcome.CREATED
    folder.check()
    kinds: dict[int, RecordKind] = {} if restarted else report.kinds
    for _ in range(4 if untimed(store) else 1):
        report = clean(store, lambda: driver_view(folder, kinds))  # noqa: B023
        kinds = report.kinds
    assert late not in names(store)
    assert {name for name in names(store) if name.startswith("log/")} <= before
    assert set(kinds.values()) == {"claim"}
    assert report.cleaned_below == driver_view(folder).oldest_needed
    folder.check()


def test_a_late_record_that_is_too_young_goes_with_a_later_cleaning(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, new_id=new_id)
    folder, _ = many_claims(store)
    store.put(record_name(1), [Folder(MemoryStore()).epochs(1).store.get(record_name(1))])
    young = clean(store, lambda: driver_view(folder), min_age_ms=3_600_000)
    assert record_name(1) in names(store)
    assert young.cleaned_below == 1  # so that a driver that starts now reads it, too
    done = clean(store, lambda: driver_view(folder, young.kinds))
    assert record_name(1) not in names(store)
    assert "get_tail" not in done.requests


def test_the_view_is_taken_after_the_listing() -> None:
    """A base that is finished and committed between the two is in the view by then."""

    class Late(MemoryStore):
        def list(self, prefix: str) -> list:  # type: ignore[type-arg]
            found = super().list(prefix)
            if prefix == "base/" and not done:
                done.append(folder.epoch(base="files"))
            return found

    done: list[int] = []
    store = Late()
    folder = Folder(store).epochs(2)
    clean(store, lambda: driver_view(folder))
    assert done
    folder.check()


def test_probes_and_foreign_objects_are_told_apart(store: ObjectStore) -> None:
    folder = busy(store)
    store.put("probe/left", [b"x"])
    store.put("log/readme.txt", [b"x"])
    look = lambda: outside_view(store, folder.log)  # noqa: E731
    young = clean(store, look, prefixes=ALL_PREFIXES, min_age_ms=3_600_000)
    assert young.removed == {} or isinstance(store, MemoryStore)
    assert young.young["probes"] == Tally(1, 1)
    assert young.foreign == ["log/readme.txt"]
    assert {"probe/left", "log/readme.txt"} <= names(store)


def test_a_record_that_does_not_read_stays(store: ObjectStore) -> None:
    folder = busy(store)
    store.put(record_name(1), [b"not a record"])
    report = outside(folder)
    assert report.unknown == [record_name(1)]
    assert report.cleaned_below == 1
    assert record_name(1) in names(store)
    folder.check()


def test_a_damaged_index_keeps_the_files_of_all_bases(store: ObjectStore) -> None:
    folder = busy(store)
    ref = folder.lineage().subtasks[0].base_before(folder.next_epoch - 1)
    assert ref is not None
    assert ref.entry.object is not None
    body = store.get(ref.entry.object)
    store.put(ref.entry.object, [body[:-1]])
    bases = {name for name in names(store) if name.startswith("base/")}
    report = outside(folder)
    assert report.files_unknown
    assert "bases" not in report.removed
    assert bases <= names(store)
    store.put(ref.entry.object, [body])
    folder.check()


def test_nothing_is_deleted_without_a_log_that_reads(store: ObjectStore) -> None:
    folder = busy(store)
    tip = record_name(folder.log.manifests()[-1].sequence)
    store.put(tip, [store.get(tip)[:-1]])
    before = names(store)
    with pytest.raises(CorruptionError):
        clean(store, lambda: outside_view(store, reader(store)))
    assert names(store) == before


def test_nothing_is_deleted_where_there_is_no_log() -> None:
    store = MemoryStore()
    store.put("data/somebody's", [b"x"])
    with pytest.raises(NotRestorableError):
        clean(store, lambda: outside_view(store, reader(store)))
    assert names(store) == {"data/somebody's"}


class Cut(MemoryStore):
    """Deletes one name after the other, and dies after so many."""

    left = 10**9

    def delete(self, wanted: Iterable[str]) -> None:
        for name in wanted:
            if self.left == 0:
                raise StoreUnreachableError("The power was cut.")
            self.left -= 1
            super().delete([name])


def test_wherever_a_cleaning_is_cut_nothing_is_lost_and_the_next_one_finishes() -> None:
    whole = Cut()
    total = sum(tally.objects for tally in outside(busy(whole), dry_run=False).removed.values())
    expected = len(names(whole))
    assert total > 10
    for cut in range(total):
        store = Cut()
        folder = busy(store)
        store.left = cut
        with pytest.raises(StoreUnreachableError):
            outside(folder)
        store.left = 10**9
        report = verify(store, JOB)
        assert report.ok, (cut, report.findings)
        folder.check()
        _no_record_names_what_is_gone(folder)
        # Another driver takes over, and cleans up what is left.
        outside(folder)
        assert len(names(store)) == expected, cut
        folder.claim("host:3").epochs(1).check()


def _no_record_names_what_is_gone(folder: Folder) -> None:
    there = names(folder.store)
    for name in there:
        if not name.startswith("log/"):
            continue
        manifest = folder.log.read(int(name[4:24]))
        for entry in manifest.slices:
            assert entry.object is None or entry.object in there
        for index in read_indexes(folder.store, [manifest]).values():
            assert index is not None
            assert {file.object for file in index.files} <= there
