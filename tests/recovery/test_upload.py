"""Bases that are made apart: what is sent, what comes back, and what an upload that fails costs."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

from recovery.local.local_copies import StoreDirectory
from recovery.local.store_pool import StorePool
from recovery.restore.restorer import OpenSubtask
from recovery.restore.upload import BaseUpload, Uploaded
from snapshot.formats.base import FileIndex, decode_index
from snapshot.protocol.bases import BasePolicy
from snapshot.protocol.lineage import SliceRef
from snapshot.protocol.messages import BaseGrant
from snapshot.storage.local_files import opened_file
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import (
    CoordinatorUnreachableError,
    CorruptionError,
    LocalCopyError,
    StaleRequestError,
    StoreUnreachableError,
)
from statebackend.rocks.store import RocksStore
from tests.recovery.driver import Changes, new_id
from tests.recovery.local.open_stores import keeping, store_of
from tests.recovery.local.open_stores import subtask as subtask_of
from tests.recovery.local.small_copies import ROOT, SMALL, marker
from tests.recovery.restore.one_subtask_job import Job
from tests.support.failing_store import FailingStore, Failure

LONG_S = 30.0
BIG = b"x" * 400


class Voice:
    """A reporter that writes down what it is told, or refuses."""

    def __init__(self, lapsed_after: int = 10**9) -> None:
        self.told: list[Uploaded] = []
        self.renewals, self.lapsed_after = 0, lapsed_after
        self.given_up = 0
        self.why: list[str] = []
        self.harmless: list[bool] = []
        self.unreached = False
        self.at_end = threading.Event()

    def give_up(self, why: str, *, harmless: bool) -> None:
        if self.unreached:
            raise CoordinatorUnreachableError("Nobody answers.")
        self.why.append(why)
        self.harmless.append(harmless)
        self.given_up += 1

    def renew(self) -> None:
        self.renewals += 1
        if self.renewals > self.lapsed_after:
            raise StaleRequestError("It has lapsed.")

    def done(self, uploaded: Uploaded) -> None:
        self.told.append(uploaded)
        self.at_end.set()


class Clock:
    """A second per look."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def __call__(self) -> float:
        self.time_s += 1
        return self.time_s


def opened(path: Path) -> StoreDirectory:
    held = subtask_of(path).create()
    held.open_store(SMALL)
    return held


def wrote(held: StoreDirectory, epoch: int, chain: str = "") -> None:
    """An epoch, in a table file of its own."""
    store = held.open_store(SMALL)
    rows = [b"\0\0%d-%d" % (epoch, n) for n in range(20)]
    store.apply(rows, [os.urandom(50) for _ in rows], marker(epoch, chain or f"c{epoch}"))
    store.flush()


def grant_of(epoch: int, *, index: bytes = b"", whole: int = 0, chain: str = "") -> BaseGrant:
    return BaseGrant(
        id=f"g{epoch}",
        epoch=epoch,
        chain=chain or f"c{epoch}",
        index=index,
        whole_limit_bytes=whole,
        renew_s=0.5,
    )


def upload(
    held: StoreDirectory, grant: BaseGrant, store: ObjectStore, voice: Voice | None = None
) -> BaseUpload:
    return BaseUpload(
        held, grant, store=store, generation=1, reporter=voice or Voice(), now_s=Clock()
    )


def test_an_upload_is_paced_and_keeps_its_grant_meanwhile(tmp_path: Path) -> None:
    held = opened(tmp_path)
    wrote(held, 0)
    voice = Voice()
    BaseUpload(
        held,
        grant_of(0),
        store=MemoryStore(),
        generation=1,
        reporter=voice,
        now_s=time.monotonic,
        bytes_per_s=4_000,
    ).run()
    (one,) = voice.told
    size_bytes = sum(file.size_bytes for file in decode_index(one.part.data).files)
    assert size_bytes > 400
    assert one.seconds >= size_bytes / 4_000
    held.release()


def uploaded(
    held: StoreDirectory, epoch: int, store: ObjectStore, index: bytes = b""
) -> tuple[FileIndex, bytes, int]:
    """The index, its bytes, and what was sent."""
    voice = Voice()
    upload(held, grant_of(epoch, index=index), store, voice).run()
    (one,) = voice.told
    assert one.kind == "files"
    assert not left_over(held)
    return decode_index(one.part.data), one.part.data, one.uploaded_bytes


def left_over(held: StoreDirectory) -> list[Path]:
    work = held.path / "work"
    return list(work.iterdir()) if work.exists() else []


def tables(index: FileIndex) -> dict[str, str]:
    return {file.name: file.object for file in index.files if file.name.endswith(".sst")}


# --- what is sent --------------------------------------------------------------------------------


def test_small_state_is_one_delta_and_one_request(tmp_path: Path) -> None:
    store, voice, held = MemoryStore(), Voice(), opened(tmp_path)
    wrote(held, 0)
    upload(held, grant_of(0, whole=1 << 20), store, voice).run()
    (one,) = voice.told
    (info,) = store.list("")
    assert (one.kind, info.name) == ("base", "base/0000000001/g0/whole")
    assert (one.part.name, one.part.rows) == (info.name, 20)
    data = store.get(info.name)
    assert (one.part.size_bytes, one.uploaded_bytes, one.state_bytes) == (len(data),) * 3
    assert blake3(data).hexdigest() == one.part.digest
    assert not left_over(held)
    held.release()


def test_of_large_state_only_new_files_are_sent_again(tmp_path: Path) -> None:
    store, held = MemoryStore(), opened(tmp_path)
    wrote(held, 0)
    first, data, all_bytes = uploaded(held, 0, store)
    assert all(name.startswith("base/0000000001/g0/") for name in tables(first).values())
    assert all_bytes == first.size_bytes + len(data)
    wrote(held, 1)
    second, _, sent_bytes = uploaded(held, 1, store, data)
    assert tables(first).items() < tables(second).items()
    (added,) = tables(second).keys() - tables(first).keys()
    assert tables(second)[added] == f"base/0000000001/g1/{added}"
    # MANIFEST and CURRENT may keep their names, never their objects.
    changing = [file for file in second.files if not file.name.endswith(".sst")]
    assert {file.object.split("/")[2] for file in changing} == {"g1"}
    assert sent_bytes < second.size_bytes
    names = {info.name for info in store.list("")}
    assert {file.object for file in (*first.files, *second.files)} == names
    held.release()


def _another_s(held: StoreDirectory, store: ObjectStore, tmp_path: Path) -> bytes:
    other = opened(tmp_path / "other")
    wrote(other, 0)
    _, data, _ = uploaded(other, 0, store)
    other.release()
    return data


def _forgotten(held: StoreDirectory, store: ObjectStore, tmp_path: Path) -> bytes:
    data = (held.path / "uploaded").read_bytes()
    (held.path / "uploaded").unlink()
    return data


def _torn(held: StoreDirectory, store: ObjectStore, tmp_path: Path) -> bytes:
    data = (held.path / "uploaded").read_bytes()
    (held.path / "uploaded").write_bytes(data[:-3])
    return data


NOT_OURS: dict[str, Callable[[StoreDirectory, ObjectStore, Path], bytes]] = {
    "none": lambda held, store, tmp_path: b"",
    "torn on its way": lambda held, store, tmp_path: b"torn",
    "of another directory, with equal names": _another_s,
    "of this one, which does not remember": _forgotten,
    "of this one, which remembers half": _torn,
}


@pytest.mark.parametrize("how", NOT_OURS)
def test_without_a_base_that_is_known_to_be_shared_everything_is_sent(
    tmp_path: Path, how: str
) -> None:
    store, held = MemoryStore(), opened(tmp_path)
    wrote(held, 0)
    uploaded(held, 0, store)
    wrote(held, 1)
    given = NOT_OURS[how](held, store, tmp_path)
    second, _, _ = uploaded(held, 1, store, given)
    assert {name.split("/")[2] for name in tables(second).values()} == {"g1"}
    held.release()


# --- the store that it is taken from -------------------------------------------------------------


class Gate(MemoryStore):
    """Uploads wait at a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.gate = threading.Event(), threading.Event()

    def put_file(self, name: str, path: str | os.PathLike[str]) -> None:
        self.there.set()
        assert self.gate.wait(LONG_S)
        super().put_file(name, path)


def test_a_store_is_written_to_and_closed_only_once_the_base_is_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, store, voice = opened(tmp_path), MemoryStore(), Voice()
    wrote(held, 0)
    there, gate, checkpoint = threading.Event(), threading.Event(), RocksStore.checkpoint

    def slow(self: RocksStore, path: str) -> list[str]:
        there.set()
        assert gate.wait(LONG_S)
        return checkpoint(self, path)

    monkeypatch.setattr(RocksStore, "checkpoint", slow)
    upload(held, grant_of(0), store, voice).start()
    assert there.wait(LONG_S)
    settled = threading.Event()
    waiting = threading.Thread(target=lambda: (held.release(), settled.set()))
    waiting.start()
    assert not settled.wait(0.2)
    assert held.store is not None
    gate.set()
    assert settled.wait(LONG_S)
    assert voice.at_end.wait(LONG_S)


@pytest.mark.parametrize("how", ["written to", "closed", "opened by another"])
def test_an_upload_goes_on_whatever_becomes_of_the_store_after_that(
    tmp_path: Path, how: str
) -> None:
    held, store, voice = opened(tmp_path), Gate(), Voice()
    wrote(held, 0)
    upload(held, grant_of(0), store, voice).start()
    assert store.there.wait(LONG_S)
    held.settle()
    wrote(held, 1)
    if how != "written to":
        held.release()
    if how == "opened by another":  # after a while without use, or in another process
        held, _ = subtask_of(tmp_path).acquire(0)
        wrote(held, 2)
    store.gate.set()
    assert voice.at_end.wait(LONG_S)
    index = decode_index(voice.told[0].part.data)
    for file in index.files:
        assert blake3(store.get(file.object)).hexdigest() == file.digest
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in index.files:
        (copy / file.name).write_bytes(store.get(file.object))
    restored = RocksStore.open(str(copy), SMALL)
    found = restored.marker()
    assert found is not None
    assert (found.epoch, len(list(restored.scan()))) == (0, 20)
    restored.close()
    held.release()


def test_what_was_left_behind_by_an_upload_that_died_is_removed_at_the_next_open(
    tmp_path: Path,
) -> None:
    held = opened(tmp_path)
    wrote(held, 0)
    dead = held.work_folder("base-dead") / "files"
    held.open_store(SMALL).checkpoint(str(dead))
    held.release()
    held, _ = subtask_of(tmp_path).acquire(0)
    held.open_store(SMALL)
    assert not left_over(held)
    held.release()


def test_a_store_that_went_on_is_not_uploaded_for_the_epoch_before(tmp_path: Path) -> None:
    held, store, voice = opened(tmp_path), MemoryStore(), Voice()
    wrote(held, 1)
    upload(held, grant_of(0), store, voice).run()
    assert not voice.told
    assert not list(store.list(""))
    held.release()


# --- what goes wrong -----------------------------------------------------------------------------


def test_a_lapsed_grant_ends_the_upload(tmp_path: Path) -> None:
    held, store, voice = opened(tmp_path), MemoryStore(), Voice(lapsed_after=1)
    wrote(held, 0)
    upload(held, grant_of(0), store, voice).run()
    assert not voice.told
    assert voice.given_up == 1
    assert not left_over(held)
    assert held.uploaded is None
    wrote(held, 1)  # the store is none the worse
    held.release()


@pytest.mark.parametrize("whole", [0, 1 << 20])
@pytest.mark.parametrize("failure", ["before", "after", OSError("The disk is gone.")])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_store_that_fails_on_the_way_costs_this_base_alone(
    tmp_path: Path, at: int, failure: Failure, whole: int
) -> None:
    held, inner, voice = opened(tmp_path), MemoryStore(), Voice()
    wrote(held, 0)
    verbs = {"put_file", "put"}
    calls = iter(range(1, 100))
    failing = FailingStore(
        inner, lambda verb, name, number: failure if verb in verbs and next(calls) == at else None
    )
    upload(held, grant_of(0, whole=whole), failing, voice).run()
    assert len(voice.told) == (at > 1 and whole > 0)
    assert len(voice.told) + voice.given_up == 1
    assert not left_over(held)
    held.settle()
    wrote(held, 1)
    upload(held, grant_of(1, whole=whole), inner, voice).run()
    assert voice.told[-1].state_bytes > 0
    held.release()


@pytest.mark.parametrize("gone", ["files", "lease", "copy", "before"])
def test_an_upload_whose_local_copy_is_gone_says_so_and_what_that_means(
    tmp_path: Path,
    gone: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    held, voice = opened(tmp_path), Voice()
    wrote(held, 0)
    turn = threading.Semaphore(1)
    one = BaseUpload(
        held,
        grant_of(0),
        store=MemoryStore(),
        generation=1,
        reporter=voice,
        now_s=Clock(),
        turn=turn,
        of="operator 'counts', subtask 3",
    )
    if gone == "lease":  # somebody sweeps between two calls
        work_folder = held.work_folder

        def swept(name: str) -> Path:
            folder = work_folder(name)
            folder.rmdir()
            return folder

        monkeypatch.setattr(held, "work_folder", swept)
        one.run()
    elif gone == "before":
        shutil.rmtree(held.path)
        one.run()
    else:
        with turn:  # another one is being sent
            one.start()
            held.settle()  # the files are linked
            shutil.rmtree(held.path / "work" if gone == "files" else held.path)
        assert wait_until(lambda: voice.given_up == 1)
    (why,) = voice.why
    assert why.startswith("The base after epoch 0 of operator 'counts', subtask 3 was given up")
    assert "[SB6002] The local copy's file" in why
    assert "is gone" in why
    assert "Nothing to do" in why
    assert "Errno" not in why
    assert "None" not in why
    assert voice.harmless == [not held.is_current]
    assert why not in caplog.text  # the driver says it
    assert voice.told == []


class BrokenStore(MemoryStore):
    """Fails to read what it is to upload."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def put_file(self, name: str, path: str | os.PathLike[str]) -> int:
        raise self.error


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("unreached", [False, True])
@pytest.mark.parametrize("failure", ["disk", "store", "stale"])
def test_an_upload_that_is_given_up_is_said_once_and_as_loud_as_it_matters(
    tmp_path: Path,
    failure: str,
    unreached: bool,
    moved: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    held, voice = opened(tmp_path), Voice()
    wrote(held, 0)
    errors: dict[str, Exception] = {
        "disk": OSError(errno.EIO, os.strerror(errno.EIO)),  # as a read of an open file raises it
        "store": StoreUnreachableError("It does not answer."),
        "stale": StaleRequestError("It has lapsed."),
    }
    if moved:
        (held.path.parent / "current").write_bytes(b"another")
    voice.unreached = unreached
    with caplog.at_level(logging.INFO, "statebackend.upload"):
        upload(held, grant_of(0), BrokenStore(errors[failure]), voice).run()
    harmless = moved or failure == "stale"
    if unreached:
        (said,) = caplog.records
        assert said.levelno == (logging.INFO if harmless else logging.WARNING)
        why = said.getMessage()
    else:
        assert not caplog.records
        (why,) = voice.why
        assert voice.harmless == [harmless]
    if failure == "disk":
        assert f"file in {held.path} cannot be read (Input/output error). Nothing to do" in why
    held.release()


def test_a_file_that_is_gone_when_a_store_opens_it_is_told_of_as_any_other(tmp_path: Path) -> None:
    held, voice = opened(tmp_path), Voice()
    wrote(held, 0)
    try:
        with opened_file(tmp_path / "000235.sst"):
            raise AssertionError
    except LocalCopyError as error:
        upload(held, grant_of(0), BrokenStore(error), voice).run()
    (why,) = voice.why
    assert "000235.sst is gone. Nothing to do if the subtask has moved" in why
    held.release()


def wait_until(met: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + LONG_S
    while not met() and time.monotonic() < until_s:
        time.sleep(0.01)
    return met()


def test_a_thread_that_cannot_be_started_keeps_no_store_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    held = opened(tmp_path)
    wrote(held, 0)
    one = upload(held, grant_of(0), MemoryStore())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError, match="start new thread"):
            one.start()
    held.release()
    assert held.store is None


def test_one_base_at_a_time_is_sent_and_the_others_keep_their_grants(tmp_path: Path) -> None:
    store, voices = Gate(), [Voice(), Voice()]
    helds = [opened(tmp_path / str(n)) for n in (0, 1)]
    for held, voice in zip(helds, voices, strict=True):
        wrote(held, 0)
        upload(held, grant_of(0), store, voice).start()
        assert store.there.wait(LONG_S)
    store.gate.set()
    assert all(voice.at_end.wait(LONG_S) for voice in voices)
    for held in helds:
        held.release()


# --- a job that makes its bases apart ------------------------------------------------------------

POLICY = BasePolicy(every_epochs=2, apart_every_epochs=4, apart_min_bytes=1 << 30, lease_s=5.0)


class ApartJob(Job):
    """One whose state is too large for its records."""

    def __init__(
        self,
        root: Path,
        kind: str,
        store: ObjectStore | None = None,
        store_pool: StorePool | None = None,
    ) -> None:
        self.time_s = 0.0
        super().__init__(
            root,
            budget=600,
            apart=True,
            store=store,
            store_pool=store_pool,
            policy=POLICY,
            now_s=lambda: self.time_s,
            whole_limit_bytes=0 if kind == "files" else 1 << 20,
        )

    def upload(self, opened: OpenSubtask, grant: BaseGrant) -> None:
        opened.store.flush()
        super().upload(opened, grant)

    def base(self) -> SliceRef | None:
        lineage = self.started.coordinator.run.lineages.get("op")
        running = self.started.coordinator.run.operators.get("op")
        known = running.lineage if running else lineage
        return known.subtasks[0].base_before(10**9) if known else None

    def objects(self, ref: SliceRef) -> list[str]:
        """Everything that a base consists of."""
        data = self.started.session._records.index(ref) if ref.entry.kind == "files" else b""
        files = [file.object for file in decode_index(data).files] if data else []
        return [*files, *([ref.entry.object] if ref.entry.object else [])]

    def run_to(self, epoch: int, host: str = "h") -> None:
        while self.epoch < epoch:
            self.run(changes_of(self.epoch), host=host)

    def run_to_base(self, number: int, host: str = "h") -> SliceRef:
        """Until the record that names the base of that number is the last one."""
        seen: list[int] = []
        while len(seen) < number:
            self.run_to(self.epoch + 1, host)
            ref = self.base()
            if ref is not None and ref.entry.epoch not in seen:
                seen.append(ref.entry.epoch)
            assert self.epoch < 60
        assert ref is not None
        return ref


def changes_of(epoch: int) -> Changes:
    keys = {b"\0\0%02d" % (epoch % 7): os.urandom(200), b"\0\1%02d" % (epoch % 3): None}
    return {**keys, b"\0\2k": b"%d" % epoch}


KINDS = ["base", "files"]


@pytest.mark.parametrize("kind", KINDS)
def test_state_comes_back_from_a_base_that_was_made_apart(tmp_path: Path, kind: str) -> None:
    job = ApartJob(tmp_path, kind)
    ref = job.run_to_base(2)
    assert ref.entry.kind == kind
    assert ref.entry.epoch < job.epoch - 1  # it was named by a later record than its own epoch's
    for more in range(3):
        job.run_to(job.epoch + min(more, 1))
        report = job.reopened(f"elsewhere{more}")  # compares marker and content
        assert report.source == "durable"
        files = len(job.objects(ref)) + 1 if kind == "files" else 1
        assert report.durable_reads == files + job.epoch - 1 - ref.entry.epoch
    job.run_to(job.epoch + 3, "elsewhere2")


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_bit_flipped_in_any_object_of_a_base_an_older_way_is_taken_or_it_is_named(
    tmp_path: Path, kind: str
) -> None:
    job = ApartJob(tmp_path, kind)
    ref = job.run_to_base(2)
    for last in (True, False):
        names = job.objects(ref)
        assert names
        for name in names:
            data = job.store.get(name)
            middle = len(data) // 2
            flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            for damage in ([flipped], None):
                if damage is None:
                    job.store.delete([name])
                else:
                    job.store.put(name, damage)
                job.restart()
                if last:  # the record before still holds the base before, and all deltas since
                    report = job.reopened(new_id())
                    assert report.source == "durable"
                    assert name in report.reason
                else:
                    with pytest.raises(CorruptionError, match=ref.entry.kind) as caught:
                        job.open(new_id())
                    assert f"epoch {ref.entry.epoch}" in caught.value.what
                    job.restart()
                    assert job.reopened("h").source == "local"
                job.store.put(name, [data])
        job.run_to(job.epoch + 1)


def test_after_a_restore_from_files_the_next_base_names_what_was_inherited(tmp_path: Path) -> None:
    with keeping() as store_pool:  # closed after every epoch, it would merge its files
        job = ApartJob(tmp_path, "files", store_pool=store_pool)
        first = job.run_to_base(1)
        given = job.started.session._records.index(first)
        job.restart()
        opened, voice = job.open("elsewhere"), Voice()
        reply = opened.reply
        grant = grant_of(reply.durable_epoch, index=given, chain=reply.durable_chain)
        upload(opened.directory, grant, job.store, voice).run()
        opened.directory.release()
    inherited, index = tables(decode_index(given)), decode_index(voice.told[0].part.data)
    assert inherited.items() < tables(index).items()
    assert voice.told[0].uploaded_bytes < index.size_bytes


def test_a_base_of_deltas_that_is_damaged_gives_way_to_one_of_files(tmp_path: Path) -> None:
    job = ApartJob(tmp_path, "files")
    job.run_to_base(1)
    job.options["whole_limit_bytes"] = 1 << 20
    job.restart()
    ref = job.run_to_base(2)
    assert ref.entry.kind == "base"
    (name,) = job.objects(ref)
    job.store.put(name, [b"torn"])
    report = job.reopened("elsewhere")
    assert report.source == "durable"
    assert name in report.reason


@pytest.mark.parametrize("kind", KINDS)
def test_an_upload_that_fails_is_made_again_as_soon_as_it_can_be(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    inner = MemoryStore()
    down = [True]

    def plan(verb: str, name: str, number: int) -> Failure:
        return "before" if down[0] and name.startswith("base/") and verb[:3] == "put" else None

    job = ApartJob(tmp_path, kind, FailingStore(inner, plan))
    job.run_to(20)
    assert job.base() is None
    assert not job.uploads
    by_driver = [one.message for one in caplog.records if one.name == "statebackend.coordinator"]
    assert all("was given up" in said and "SB2002" in said for said in by_driver)
    assert by_driver
    down[0] = False
    job.run_to(21)  # its grant was given back
    assert len(job.uploads) == 1
    job.run_to_base(1)
    assert job.reopened("elsewhere").source == "durable"


def test_a_base_under_a_lapsed_grant_is_refused_and_never_named(tmp_path: Path) -> None:
    job = ApartJob(tmp_path, "files")
    told = job.upload

    def too_late(opened: OpenSubtask, grant: BaseGrant) -> None:
        job.time_s += POLICY.lease_s + 1
        told(opened, grant)

    job.upload = too_late  # type: ignore[method-assign]
    job.run_to(30)
    assert job.base() is None
    assert not list(job.directory("h").glob("work/*"))


# --- a process that is killed half way -----------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from tests.recovery import test_upload
from tests.recovery.local.open_stores import store_of
root, after = Path(sys.argv[1]), int(sys.argv[2])
class Killing(type(store_of(root))):
    def put_file(self, name, path):
        global after
        if name.startswith("base/") and "/g0/" not in name:
            after -= 1
            if after < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        super().put_file(name, path)
store = Killing(root / "durable", new_id=test_upload.new_id)
held = test_upload.opened(root)
test_upload.wrote(held, 0)
_, data, _ = test_upload.uploaded(held, 0, store)
test_upload.wrote(held, 1)
test_upload.uploaded(held, 1, store, data)
"""


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_process_that_is_killed_in_an_upload_leaves_a_store_that_can_be_uploaded(
    tmp_path: Path, after: int
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(after)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    store = store_of(tmp_path)
    held, reason = subtask_of(tmp_path).acquire(0)
    assert reason == ""
    assert left_over(held)
    found = held.open_store(SMALL).marker()
    assert found is not None
    assert found.epoch == 1
    assert not left_over(held)
    given = (held.path / "uploaded").read_bytes()
    first = decode_index(given)
    again = Voice()
    grant = BaseGrant(id="again", epoch=1, chain="c1", index=given, whole_limit_bytes=0, renew_s=1)
    upload(held, grant, store, again).run()
    index = decode_index(again.told[0].part.data)
    assert tables(first).items() < tables(index).items()
    assert not any("/g1/" in file.object for file in index.files)  # those are of no base
    for file in index.files:
        assert blake3(store.get(file.object)).hexdigest() == file.digest
    held.release()


def test_a_store_that_is_kept_open_is_uploaded_while_others_ask_for_it(tmp_path: Path) -> None:
    store, voice = Gate(), Voice()
    with keeping() as store_pool:
        local = subtask_of(tmp_path, store_pool)
        held, _ = local.acquire(0)
        wrote(held, 0)
        upload(held, grant_of(0), store, voice).start()
        assert store.there.wait(LONG_S)
        local.give_back(held)
        other, reason = subtask_of(tmp_path).acquire(LONG_S)
        assert (other.path, reason) == (held.path, "")
        wrote(other, 1)
        store.gate.set()
        assert voice.at_end.wait(LONG_S)
        other.release()
