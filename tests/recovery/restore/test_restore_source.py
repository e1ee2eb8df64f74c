"""Restores: where state comes from, and what the holder of a copy means for it."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rocksdict import Rdict

from snapshot.protocol.messages import AncestorCopy, BeginReply, LocalCopy
from statebackend.errors import StoreUnreachableError
from statebackend.rocks.parted import open_database
from statebackend.rocks.store import RocksStore
from tests.recovery.driver import base_of, part_of
from tests.recovery.restore.one_subtask_job import SMALL, Job, K, L, M

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
