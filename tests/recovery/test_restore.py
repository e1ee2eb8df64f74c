"""Restores carried out: real stores on disk, a real session and log, damage in every place."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rocksdict import Rdict

from recovery.local.local_copies import LocalSubtask
from recovery.local.store_pool import Clock, StorePool
from recovery.restore import restorer as restore
from recovery.restore.restorer import OpenSubtask, Restorer, Site
from recovery.restore.upload import BaseUpload, Uploaded
from snapshot.formats.delta import DeltaRows
from snapshot.formats.delta_stream import as_lists
from snapshot.formats.names import data_name
from snapshot.formats.record import record_name
from snapshot.protocol.messages import (
    AncestorCopy,
    BaseGrant,
    BeginReply,
    LocalCopy,
    RestoreReport,
    SlicePart,
)
from snapshot.storage.counting import CountingStore
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import (
    CorruptionError,
    LocalCopyError,
    LocalDirError,
    StoreUnreachableError,
)
from statebackend.keygroups import KeyGroupRange
from statebackend.rocks import store as rocks
from statebackend.rocks.parted import Opener, open_database
from statebackend.rocks.store import RocksSettings, RocksStore
from statebackend.state.table import StateTable
from tests.recovery.driver import (
    Changes,
    Started,
    State,
    ack_of,
    base_of,
    begin_of,
    done_of,
    new_id,
    part_of,
    renewal_of,
)

SMALL = RocksSettings(block_cache_bytes=1 << 20, write_buffer_bytes=1 << 20)


class Ticks:
    """A clock that moves by itself: a quarter of a second per look."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def __call__(self) -> float:
        self.time_s += 0.25
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds


class Told:
    """Tells a job's session of an upload."""

    def __init__(self, job: Job, grant: BaseGrant) -> None:
        self.job, self.grant = job, grant

    def renew(self) -> None:
        self.job.started.session.base_renewed(renewal_of(self.grant))

    def give_up(self, why: str, *, harmless: bool) -> None:
        self.job.started.session.base_renewed(
            renewal_of(self.grant, given_up=True, why=why, harmless=harmless)
        )

    def done(self, uploaded: Uploaded) -> None:
        self.job.uploads.append(uploaded)
        self.job.started.session.base_done(done_of(self.grant, uploaded))


class Job:
    """A job of one operator and one subtask on some hosts, its driver started again at will."""

    def __init__(
        self,
        root: Path,
        *,
        budget: int = 1 << 20,
        every: int = 64,
        apart: bool = False,
        store: ObjectStore | None = None,
        store_pool: StorePool | None = None,
        **options: Any,
    ) -> None:
        self.root = root
        self.options = options
        self.apart = apart
        self.uploads: list[Uploaded] = []
        self.store = store or MemoryStore()
        self.store_pool = store_pool
        self.opener: Opener = open_database
        self.durable = CountingStore(self.store)
        self.budget, self.every = budget, every
        self.epoch = 0
        self.attempts = 0
        self.asked: list[LocalCopy] = []
        self.truth: dict[int, State] = {-1: {}}
        self.reports: list[RestoreReport | None] = []
        self.restart()

    def restart(self, epoch: int | None = None) -> None:
        """A new driver; Spark runs this batch next."""
        if epoch is not None:
            self.epoch = epoch
        self.started = Started(
            self.durable,
            {"op": 1},
            first_epoch=self.epoch,
            base_every_epochs=self.every,
            inline_budget_bytes=self.budget,
            **self.options,
        )

    def local(self, host: str) -> LocalSubtask:
        ticks = Ticks()
        return LocalSubtask(
            str(self.root / host),
            job="clicks",
            operator="op",
            key_groups=KeyGroupRange(0, 7),
            new_id=new_id,
            clock=Clock(ticks, ticks.sleep),
            store_pool=self.store_pool,
            opener=self.opener,
        )

    def directory(self, host: str) -> Path:
        path = self.local(host).path
        return path / (path / "current").read_text()

    def ask(
        self, copy: LocalCopy, ancestors: list[AncestorCopy] | None
    ) -> tuple[BeginReply, list[bytes]]:
        assert ancestors is None  # nobody changed the parallelism
        self.asked.append(copy)
        return self.started.session.begin(begin_of(self.epoch, attempt=self.attempts, copy=copy))

    def open(self, host: str = "h") -> OpenSubtask:
        """Begin the running epoch on a host: what `Restorer` is for."""
        self.attempts += 1
        self.asked = []
        opened = Restorer(
            self.local(host),
            Site(operator="op", subtask=0, host=host, executor="e"),
            ask=self.ask,
            store=self.durable,
            now_s=Ticks(),
            lease_timeout_s=1.0,
            settings=SMALL,
        ).open()
        self.opened = opened
        marker = opened.store.marker()
        assert marker is not None
        reply = opened.reply
        assert reply.base_epoch == self.epoch - 1
        assert (marker.epoch, marker.applying) == (reply.durable_epoch, "")
        assert marker.chain == reply.durable_chain
        assert dict(opened.store.scan()) == self.truth[reply.durable_epoch]
        self.table = StateTable(opened.store)
        for epoch, rows in opened.layers:
            self.table.add_layer(epoch, rows)
        assert dict(self.table.snapshot()) == self.truth[reply.base_epoch]
        return opened

    def _part(self, part: SlicePart) -> SlicePart:
        if part.size_bytes <= self.budget:
            return part
        name = data_name(self.started.tenure.generation, self.epoch, new_id())
        self.store.put(name, [part.data])
        return SlicePart(digest=part.digest, size_bytes=part.size_bytes, rows=part.rows, name=name)

    def attempt(self, changes: Changes, host: str = "h") -> OpenSubtask:
        """One attempt up to its ack, as a task makes it."""
        opened = self.open(host)
        self.reports.append(opened.report)
        table = self.table
        for key, value in changes.items():
            table.put(key, value)
        keys, values = table.freeze(self.epoch).sorted()
        delta = part_of(dict(zip(keys, values, strict=True)))
        opened.directory.write_delta(self.epoch, delta.digest, delta.data)
        after = dict(table.snapshot())
        base, large_bytes = None, 0
        if opened.reply.base_due:
            base = base_of(after)
            if self.apart and base.size_bytes > self.budget:
                base, large_bytes = None, base.size_bytes
            else:
                base = self._part(base)
        if opened.reply.grant is not None:
            self.upload(opened, opened.reply.grant)
        self.local(host).give_back(opened.directory)
        ack = ack_of(
            opened.reply.chain,
            self._part(delta),
            self.epoch,
            attempt=self.attempts,
            base=base,
            large_bytes=large_bytes,
        )
        durable = self.started.session.ack(ack).durable
        assert durable is not self.started.coordinator.run.asynchronous
        self.truth[self.epoch] = after
        return opened

    def upload(self, opened: OpenSubtask, grant: BaseGrant) -> None:
        """Done within the epoch, in this thread."""
        BaseUpload(
            opened.directory,
            grant,
            store=self.durable,
            generation=opened.reply.generation,
            reporter=Told(self, grant),
            now_s=Ticks(),
        ).run()

    def run(self, *epochs: Changes, host: str = "h") -> None:
        """Epochs, each of them finished and committed."""
        for changes in epochs:
            self.attempt(changes, host)
            self.epoch += 1

    def reopened(self, host: str = "h") -> RestoreReport:
        """Open the running epoch as the first attempt after a restart; its report."""
        self.restart()
        opened = self.open(host)
        opened.directory.release()
        assert opened.report is not None
        return opened.report


K, L, M = b"\0\0k", b"\0\1l", b"\0\7m"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Three epochs done on host h; its store stands at epoch 1, with the delta of 2 beside it."""
    made = Job(tmp_path)
    made.run({K: b"0", L: b"0"}, {K: b"1", M: b"1"}, {L: None, M: b"2"})
    return made


# --- where it comes from -------------------------------------------------------------------------


def test_a_new_operator_starts_empty_and_says_so(tmp_path: Path) -> None:
    job = Job(tmp_path)
    report = job.reopened()
    assert report.source == "empty"
    assert report.reason == ""
    assert (report.operator, report.subtask, report.epoch) == ("op", 0, -1)
    assert (report.host, report.executor) == ("h", "e")
    assert (report.local_bytes, report.durable_bytes, report.durable_reads) == (0, 0, 0)


def test_a_running_subtask_reports_nothing_while_all_is_ordinary(job: Job) -> None:
    assert job.reports[0] is not None
    assert job.reports[1:] == [None, None]
    opened = job.open()
    assert opened.report is None
    assert opened.reply.steps[0].source == "local"
    opened.directory.release()


def test_after_a_restart_the_local_store_and_its_delta_are_enough(job: Job) -> None:
    job.restart()
    before = job.durable.counts.get("get")
    report = job.reopened()
    assert report.source == "local"
    assert report.reason == ""
    assert report.epoch == 2
    assert report.local_bytes == part_of({L: None, M: b"2"}).size_bytes
    assert (report.durable_bytes, report.durable_reads) == (0, 0)
    assert job.durable.counts.get("get") == before
    # It has been applied now: nothing is read the next time.
    job.restart()
    assert (job.reopened().source, job.reopened().local_bytes) == ("local", 0)


def test_the_report_says_how_long_it_took_by_the_clock_it_was_given(job: Job) -> None:
    assert job.reopened().seconds == 0.25


def test_no_opening_waits_for_a_merge_however_often_it_was_called_off(job: Job) -> None:
    path = str(job.directory("h") / "db")
    store = RocksStore.open(path, SMALL, compacting=False)
    at, rows = store.marker(), dict(store.scan())
    for _ in range(16):
        store.apply(list(rows), list(rows.values()), at)
        store.flush()
    store.close()
    with pytest.MonkeyPatch.context() as patch:
        # With so little, RocksDB would be quick enough: here no merge ever comes to its end.
        job.opener = partial(RocksStore.open, compacting=False)
        patch.setattr("statebackend.rocks.store.Rdict", Unmerged)
        for _ in range(6):
            job.restart()
            opened = job.open()
            assert opened.store.level0_files() >= 16
            assert dict(opened.store.scan()) == job.truth[opened.reply.durable_epoch]
            opened.directory.release()
    job.opener = open_database
    job.restart()
    opened = job.open()
    tick = threading.Event()  # it is merged beside the rows, once there is time
    assert any(opened.store.level0_files() < 8 or tick.wait(0.02) for _ in range(1500))
    assert dict(opened.store.scan()) == job.truth[opened.reply.durable_epoch]
    opened.directory.release()
    assert job.reopened().source == "local"


class Unmerged:
    """A database that nobody may merge by hand."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._db = Rdict(*args, **kwargs)

    def compact_range(self, *args: object) -> None:
        raise AssertionError("an opening waits for a merge")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


def test_on_another_host_everything_is_read_back(job: Job) -> None:
    report = job.reopened("elsewhere")
    assert report.source == "durable"
    assert report.reason == "there is no local copy on this host"
    parts = [part_of(c) for c in ({K: b"0", L: b"0"}, {K: b"1", M: b"1"}, {L: None, M: b"2"})]
    assert report.durable_bytes == sum(part.size_bytes for part in parts)
    assert (report.local_bytes, report.durable_reads) == (0, 3)
    assert job.asked == [LocalCopy()]


def test_from_the_newest_base_on_only_what_came_after_is_read(tmp_path: Path) -> None:
    job = Job(tmp_path, every=2)
    job.run(*({K: b"%d" % n, bytes([0, n]): b"x" * 50} for n in range(6)))
    report = job.reopened("elsewhere")
    base, delta = base_of(job.truth[4]), part_of({K: b"5", b"\0\5": b"x" * 50})
    assert (report.durable_reads, report.source) == (2, "durable")
    assert report.durable_bytes == base.size_bytes + delta.size_bytes


def test_epochs_without_changes_cost_no_read_and_no_byte(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.run({K: b"0"}, {}, {}, {K: b"3"}, {})
    report = job.reopened("elsewhere")
    assert report.durable_reads == 2
    report = job.reopened()
    assert (report.source, report.local_bytes, report.durable_reads) == ("local", 0, 0)


def test_a_copy_of_long_ago_is_brought_up_with_durable_deltas(job: Job) -> None:
    job.restart()
    job.reopened("elsewhere")  # stands at epoch 2 from here on
    job.run({K: b"3"}, {K: b"4"}, host="h")
    report = job.reopened("elsewhere")
    assert report.source == "mixed"
    assert report.durable_reads == 2
    assert report.local_bytes == 0


def test_a_repeated_epoch_starts_from_the_state_before_it(job: Job) -> None:
    # Begun, applied up to epoch 2, crashed; Spark repeats the batch.
    job.open().directory.release()
    job.restart()
    job.run({K: b"again"})
    assert job.truth[3][K] == b"again"


def test_a_store_that_is_ahead_is_not_used(job: Job) -> None:
    job.open().directory.release()  # stands at epoch 2 now
    job.restart(2)
    report = job.reopened()
    assert report.source == "durable"
    assert report.reason == "the local copy stands at epoch 2, after epoch 1"


def test_what_an_attempt_left_that_did_not_win_is_not_used(job: Job) -> None:
    job.attempt({K: b"first"}, "h")
    job.attempt({K: b"second"}, "other")
    job.epoch += 1
    report = job.reopened("h")
    assert report.source == "mixed"  # its delta is of another digest: the durable one goes on top
    assert report.durable_reads == 1
    assert job.truth[3][K] == b"second"


def test_a_store_with_what_did_not_win_in_it_is_not_used(job: Job) -> None:
    job.attempt({K: b"first"}, "h")
    job.epoch += 1
    job.open("h").directory.release()  # applied it
    job.restart(3)
    job.run({K: b"second"}, host="other")
    report = job.reopened("h")
    assert report.source == "durable"
    assert report.reason == "the local copy's lineage at epoch 3 is not the log's"


def test_a_store_of_another_job_under_the_same_name_is_not_used(job: Job, tmp_path: Path) -> None:
    other = Job(tmp_path / "other")
    other.run({K: b"foreign"}, {K: b"foreign"})
    shutil.rmtree(job.root / "h")
    shutil.copytree(other.root / "h", job.root / "h")
    report = job.reopened()
    assert report.source == "durable"
    assert "belongs to another job" in report.reason


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


# --- holders -------------------------------------------------------------------------------------


def test_a_holder_that_does_not_answer_is_left_alone_and_the_state_comes_from_afar(
    job: Job,
) -> None:
    frozen, _ = job.local("h").acquire(0)
    report = job.reopened()
    assert report.source == "durable"
    assert report.reason == f"the local copy was held by another process ({frozen.path.name})"
    assert frozen.path.exists()
    frozen.release()


def test_a_store_whose_lock_is_held_is_left_alone_too(job: Job) -> None:
    # Its lease is free (as after an unmounted or copied directory), RocksDB's own lock is not.
    frozen = RocksStore.open(str(job.directory("h") / "db"), SMALL)
    report = job.reopened()
    assert report.source == "durable"
    assert "open in another process" in report.reason
    frozen.close()


@pytest.mark.parametrize("error", [StoreUnreachableError("Down."), KeyboardInterrupt()])
def test_whatever_the_coordinator_answers_the_lease_is_let_go(
    job: Job, error: BaseException
) -> None:
    real, where = job.ask, job.directory("h")

    def ask(
        copy: LocalCopy, ancestors: list[AncestorCopy] | None
    ) -> tuple[BeginReply, list[bytes]]:
        raise error

    job.ask = ask  # type: ignore[method-assign]
    job.restart()
    with pytest.raises(type(error)):
        job.open()
    job.ask = real  # type: ignore[method-assign]
    assert job.reopened().source == "local"
    assert job.directory("h") == where


def test_what_is_opened_stays_leased_until_it_is_released(job: Job) -> None:
    opened = job.open()
    lease = os.open(opened.directory.path / "lease", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
    opened.directory.release()
    fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lease)


def test_store_directories_of_before_are_swept(job: Job) -> None:
    job.restart(2)
    job.reopened()
    job.restart(1)
    job.reopened()
    assert [p.name for p in job.local("h").path.iterdir() if p.is_dir()] == [
        job.directory("h").name
    ]


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
