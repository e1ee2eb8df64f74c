"""A job's writes to its store, cut after every one of them: what is there then is enough, and all.

One timeline has everything that is ever written: records, deltas as objects of their own, bases of
both kinds, and cleanings. It is cut by an error that nothing catches, and a new driver starts.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from snapshot.bases import BasePolicy
from snapshot.cleaning import ALL_PREFIXES, clean, outside_view, read_index
from snapshot.lineage import resolve
from snapshot.log import CommitLog
from snapshot.names import parse_base_name, parse_data_name
from snapshot.record import parse_record_name
from snapshot.storage.base import ObjectStore
from snapshot.storage.failing import FailingStore, Failure
from snapshot.storage.memory import MemoryStore
from tests.recovery.driver import JOB, Changes, manifests_of, new_id
from tests.recovery.test_restore import Job

WRITES = {"put", "put_file", "put_chunks", "create", "delete"}
POLICY = BasePolicy(every_epochs=2, apart_every_epochs=3, apart_min_bytes=1 << 30)
EPOCHS = 12
LONG_S = 30.0


class Killed(BaseException):
    pass


class Cut:
    """A plan for a store whose client dies before its write of a number."""

    def __init__(self, before: int) -> None:
        self.before, self.writes, self.dead = before, 0, False

    def __call__(self, verb: str, name: str, number: int) -> Failure:
        if verb in WRITES:
            self.writes += 1
            self.dead = self.dead or self.writes > self.before
        return Killed() if self.dead else None


def job_on(root: Path, store: ObjectStore, whole: int, *, asynchronous: bool) -> Job:
    return Job(
        root,
        budget=250,
        apart=True,
        store=store,
        policy=POLICY,
        whole_limit_bytes=whole,
        asynchronous=asynchronous,
        clean_every_epochs=3,
    )


def changes_of(epoch: int) -> Changes:
    large = b"%d" % epoch * (300 if epoch % 4 == 1 else 20)  # is one an object of its own
    return {
        b"\0\0%d" % (epoch % 5): bytes(hash((epoch, n)) % 256 for n in range(90)),
        b"\0k": large,
    }


def lived(job: Job, cut: Cut, epochs: int) -> None:
    with contextlib.suppress(Killed):
        while job.epoch < epochs and not cut.dead:
            job.run(changes_of(job.epoch))
            job.started.session.drain(LONG_S)
    job.opened.incarnation.release()


def named(store: ObjectStore) -> set[str]:
    """Every object that the live records name, each of them there."""
    names: set[str] = set()
    for manifest in manifests_of(store):
        for entry in manifest.slices:
            names.update([entry.object] if entry.object else [])
            if entry.kind == "files":
                index = read_index(store, manifest.sequence, entry)
                names.update(file.object for file in index.files)
    there = {info.name for info in store.list("")}
    assert names <= there, f"gone: {sorted(names - there)}"
    return names


def check_nothing_is_left(store: ObjectStore) -> None:
    """After a cleaning by somebody else: no garbage of an earlier generation, no old record."""
    log = CommitLog(store, job=JOB, writer="cleaner", new_id=new_id)
    clean(store, lambda: outside_view(store, log), prefixes=ALL_PREFIXES)
    tip, live = manifests_of(store)[-1], named(store)
    for info in store.list(""):
        parsed = parse_data_name(info.name) or parse_base_name(info.name)
        if parsed is not None:
            assert info.name in live or parsed.generation == tip.generation, info.name
        else:
            sequence = parse_record_name(info.name)
            assert sequence is not None, info.name
            if sequence < tip.oldest_needed:
                assert log.read(sequence).kind == "claim"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("whole", [0, 1 << 20])
def test_wherever_a_job_s_writes_are_cut_the_state_comes_back_and_nothing_is_left_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: int, *, asynchronous: bool
) -> None:
    monkeypatch.setattr("snapshot.cleaning.DELETE_BATCH", 1)
    uncut = Cut(10**9)
    inner = MemoryStore()
    job = job_on(tmp_path / "all", FailingStore(inner, uncut), whole, asynchronous=asynchronous)
    lived(job, uncut, EPOCHS)
    kinds = {entry.kind for manifest in manifests_of(inner) for entry in manifest.slices}
    assert kinds == {"delta", "base" if whole else "files"}
    assert job.started.session.cleaner.reports
    cuts = range(1, uncut.writes)  # the claim is there: without it there is no job
    assert len(cuts) > 25
    for before in cuts:
        cut, inner = Cut(before), MemoryStore()
        root = tmp_path / str(before)
        job = job_on(root, FailingStore(inner, cut), whole, asynchronous=asynchronous)
        lived(job, cut, EPOCHS)
        if not cut.dead:  # how many files a base has is RocksDB's business: it had fewer writes
            continue
        named(inner)
        resolved = resolve(manifests_of(inner))
        last = resolved["op"].last_epoch if resolved else -1
        # Spark has committed the batch before this one, and goes back by that at most.
        assert last >= job.epoch - (2 if asynchronous else 1)
        again = job_on(root, inner, whole, asynchronous=asynchronous)
        again.truth, again.attempts = job.truth, job.attempts
        again.restart(min(job.epoch, last + 1))
        for host in ("h", "elsewhere"):
            again.open(host).incarnation.release()  # compares marker and content
        lived(again, Cut(10**9), again.epoch + 2)
        named(inner)
        again.restart()
        check_nothing_is_left(inner)
        again.reopened("third")
