"""Restores from half-applied stores, and from damaged copies, local and durable."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recovery.restore import restorer as restore
from snapshot.formats.delta import DeltaRows
from snapshot.formats.delta_in_pieces import as_lists
from snapshot.formats.record import record_name
from snapshot.protocol.messages import AncestorCopy, BeginReply, LocalCopy
from statebackend.errors import (
    CorruptionError,
    LocalCopyError,
    LocalDirError,
    StoreUnreachableError,
)
from statebackend.rocks import store as rocks
from statebackend.rocks.store import RocksSettings, RocksStore
from tests.recovery.driver import part_of
from tests.recovery.restore.one_subtask_job import SMALL, Job, K, L, M

# --- half applied --------------------------------------------------------------------------------


def _cut_while_applying(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply part of the newest epoch to the store of host h, then stop."""

    class Killed(BaseException):
        pass

    write, left = RocksStore._write, iter(range(2))

    def cut(self: RocksStore, *args: Any) -> None:
        if next(left, None) is None:
            raise Killed
        write(self, *args)

    def one_by_one(rows: Iterable[DeltaRows]) -> Iterator[Any]:
        for keys, values in as_lists(rows):
            yield from (((key,), (value,)) for key, value in zip(keys, values, strict=True))

    with monkeypatch.context() as patched:
        patched.setattr(restore, "as_lists", one_by_one)
        patched.setattr(RocksStore, "_write", cut)
        with pytest.raises(Killed):
            job.open()


def test_a_store_that_was_cut_half_way_to_an_epoch_goes_on_to_that_epoch(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    _cut_while_applying(job, monkeypatch)
    report = job.reopened()
    assert job.asked[0].applying
    assert (report.source, report.durable_reads) == ("local", 0)


def test_a_store_that_was_cut_half_way_is_not_used_for_the_epoch_before(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    _cut_while_applying(job, monkeypatch)
    job.restart(2)
    report = job.reopened()
    assert report.source == "durable"
    assert report.reason == "the local copy was left half way past epoch 1"


def test_a_base_that_was_cut_half_way_is_started_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, every=2)
    job.run({K: b"0", L: b"0", M: b"0"}, {K: b"1"}, {K: b"2"}, host="other")
    _cut_while_applying(job, monkeypatch)
    report = job.reopened()
    assert job.asked[0].epoch is None
    assert (report.source, report.durable_reads) == ("durable", 1)


# --- damage to local deltas ----------------------------------------------------------------------


def _delta_file(job: Job) -> Path:
    (path,) = (job.directory("h") / "deltas").glob("2-*")
    return path


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "x").touch()


DAMAGE: dict[str, Any] = {
    "flipped": _flipped,
    "cut short": lambda path: os.truncate(path, 100),
    "emptied": lambda path: os.truncate(path, 0),
    "another's": lambda path: path.write_bytes(part_of({K: b"another"}).data),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_for_a_damaged_local_delta_the_durable_one_is_taken(job: Job, how: str) -> None:
    path = _delta_file(job)
    DAMAGE[how](path)
    job.restart()
    where = job.directory("h")
    report = job.reopened()
    assert report.source == "mixed"
    assert report.durable_reads == 1
    assert report.durable_bytes == part_of({L: None, M: b"2"}).size_bytes
    assert "damaged" in report.reason or "digest" in report.reason
    assert job.directory("h") == where  # the store beside it was good
    assert not path.exists()
    assert len(job.asked) == 2
    assert [copy.epoch for copy in job.asked] == [1, 1]
    assert [[e for e, _ in copy.deltas if e > 1] for copy in job.asked] == [[2], []]


def test_a_local_delta_that_vanished_is_the_durable_one_s_business(job: Job) -> None:
    path = _delta_file(job)
    real_begin = job.ask

    def ask(
        copy: LocalCopy, ancestors: list[AncestorCopy] | None
    ) -> tuple[BeginReply, list[bytes]]:
        path.unlink(missing_ok=True)  # after it was described
        return real_begin(copy, ancestors)

    job.ask = ask  # type: ignore[method-assign]
    assert job.reopened().source == "mixed"


def test_a_local_delta_that_cannot_be_removed_is_the_durable_one_s_business(job: Job) -> None:
    _a_directory(_delta_file(job))
    assert job.reopened().source == "mixed"


@pytest.mark.parametrize("behind", [2, 3, 4, 5, 6])
def test_many_damaged_local_deltas_never_leave_a_store_at_another_epoch(
    tmp_path: Path, behind: int
) -> None:
    """However many are damaged: the right state, or a typed error and the right state next time."""
    job = Job(tmp_path)
    job.run({K: b"old"})
    job.open().directory.release()  # the store stands at epoch 0
    kept = tmp_path / "kept"
    shutil.copytree(job.root / "h", kept)
    job.run(*({K: b"%d" % n, bytes([0, n]): b"x"} for n in range(behind)))
    shutil.rmtree(job.root / "h")
    shutil.copytree(kept, job.root / "h")
    folder = job.directory("h") / "deltas"
    for step in job.started.coordinator.run.operators["op"].lineage.subtasks[0].deltas.values():
        if step.entry.epoch > 0:
            (folder / f"{step.entry.epoch}-{step.entry.digest}").write_bytes(b"torn")
    job.restart()
    try:
        report = job.reopened()  # checks marker and content
    except LocalCopyError:
        job.restart()
        report = job.reopened()
    assert report.source == "mixed"


# --- damage to local stores ----------------------------------------------------------------------


def _tables(job: Job) -> list[Path]:
    return sorted((job.directory("h") / "db").glob("*.sst"))


def _no_marker_json(job: Job) -> None:
    store = RocksStore.open(str(job.directory("h") / "db"), SMALL)
    store._db[rocks._MARKER_KEY] = b"{"
    store.close()


STORE_DAMAGE: dict[str, Any] = {
    "a table file is missing": lambda job: _tables(job)[0].unlink(),
    "a table file is cut": lambda job: os.truncate(_tables(job)[0], 100),
    "CURRENT is foreign": lambda job: (job.directory("h") / "db" / "CURRENT").write_text("x\n"),
    "a block is rotten": lambda job: [_flipped(path) for path in _tables(job)],
    "the marker is torn": _no_marker_json,
}


@pytest.mark.parametrize("how", STORE_DAMAGE)
def test_a_damaged_store_is_replaced_by_a_new_one_from_the_durable_copy(job: Job, how: str) -> None:
    bad = job.directory("h")
    STORE_DAMAGE[how](job)
    report = job.reopened()
    assert report.source == "durable"
    assert report.durable_reads == 3
    assert str(bad) in report.reason
    assert job.directory("h") != bad
    assert not bad.exists()  # nobody held it any more
    assert job.asked[-1] == LocalCopy()
    # From here on it is ordinary again.
    job.run({K: b"3"}, {K: b"4"})
    assert job.reports[-1] is None


def test_a_damaged_store_is_marked_before_anything_else_can_fail(job: Job) -> None:
    bad = job.directory("h")
    STORE_DAMAGE["a table file is missing"](job)
    job.restart()

    def ask(
        copy: LocalCopy, ancestors: list[AncestorCopy] | None
    ) -> tuple[BeginReply, list[bytes]]:
        raise StoreUnreachableError("The store is down.")

    job.ask = ask  # type: ignore[method-assign]
    with pytest.raises(StoreUnreachableError):
        job.open()
    assert "damaged" in (bad / "BAD").read_text()


def test_a_damaged_store_that_cannot_even_be_closed_is_replaced_too(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, close = str(job.directory("h") / "db"), RocksStore.close
    apply = RocksStore.apply_batches

    def rotten(self: RocksStore, *args: Any) -> None:
        if self.path == bad:
            raise LocalCopyError("A file is gone.")
        apply(self, *args)

    def stuck(self: RocksStore) -> None:
        close(self)
        if self.path == bad:
            raise LocalCopyError("A file is gone, still.")

    monkeypatch.setattr(RocksStore, "apply_batches", rotten)
    monkeypatch.setattr(RocksStore, "close", stuck)
    assert job.reopened().source == "durable"


def test_stores_that_keep_failing_end_in_an_error_and_not_in_a_loop(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rotten(path: str, settings: RocksSettings | None = None, **more: bool) -> RocksStore:
        raise LocalCopyError(f"The local store {path} is damaged.")

    job.restart()
    with monkeypatch.context() as patched:
        patched.setattr(RocksStore, "open", rotten)
        with pytest.raises(LocalCopyError, match=r"'op', subtask 0: 4 local copies in a row"):
            job.open()
    assert job.reopened().source == "durable"


def test_a_disk_that_cannot_be_written_is_not_tried_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RocksStore, *args: Any) -> None:
        raise LocalDirError("There is no room.")

    where = job.directory("h")
    job.restart()
    with monkeypatch.context() as patched:
        patched.setattr(RocksStore, "apply_batches", full)
        with pytest.raises(LocalDirError, match="no room"):
            job.open()
    assert len(job.asked) == 1
    assert job.reopened().source == "local"  # nothing was wrong with the copy, and it was let go
    assert job.directory("h") == where


# --- damage to durable slices --------------------------------------------------------------------


@pytest.fixture
def objects(tmp_path: Path) -> Job:
    """Every slice in an object of its own."""
    made = Job(tmp_path, budget=0)
    made.run({K: b"0"}, {K: b"1"})
    made.restart()
    return made


@pytest.mark.parametrize("how", ["flipped", "cut short", "emptied", "another's"])
def test_a_damaged_object_is_named_and_nothing_else_is_taken_for_it(objects: Job, how: str) -> None:
    job = objects
    name = job.started.coordinator.run.lineages["op"].subtasks[0].deltas[0].entry.object
    assert name is not None
    data = job.store.get(name)
    damaged = {
        "flipped": data[:50] + bytes([data[50] ^ 1]) + data[51:],
        "cut short": data[:-1],
        "emptied": b"",
        "another's": part_of({K: b"another"}).data,
    }[how]
    job.store.put(name, [damaged])
    with pytest.raises(CorruptionError, match=name):
        job.open("elsewhere")
    # A host that does not need it is not disturbed.
    assert job.reopened("h").source == "local"
    job.store.put(name, [data])
    assert job.reopened("elsewhere").source == "durable"


def test_a_missing_object_is_named(objects: Job) -> None:
    job = objects
    name = job.started.coordinator.run.lineages["op"].subtasks[0].deltas[1].entry.object
    assert name is not None
    job.store.delete([name])
    with pytest.raises(CorruptionError, match=name) as caught:
        job.open("elsewhere")
    assert "Bring back a host that has the local copy" in caught.value.todo
    assert job.reopened("h").source == "local"


def test_a_damaged_slice_in_a_record_is_named(job: Job) -> None:
    sequence = job.started.coordinator.run.operators["op"].lineage.epochs[2].sequence
    name = record_name(sequence)
    data = bytearray(job.store.get(name))
    data[50] ^= 1  # within the first slice; the manifest is whole
    job.store.put(name, [data])
    job.restart()
    with pytest.raises(CorruptionError, match=name):
        job.open("elsewhere")
    assert job.reopened("h").source == "local"
