"""A job's life on one host whose disk is recorded: its store is a folder, its copies lie beside it.

Every step of the protocol is in it: claims, records, large slices, both kinds of bases, cleanings,
local copies that are made, applied to, handed on and swept, and a restore from the durable copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from unittest import mock

from recovery.inspect.history_reader import read_history
from snapshot.formats.history_object import HISTORY_PREFIX
from snapshot.formats.object_names import parse_base_name, parse_data_name
from snapshot.formats.record import parse_record_name
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.base_policy import BasePolicy
from snapshot.protocol.lineage import resolve
from snapshot.retention.garbage_collection import ALL_PREFIXES, clean, outside_view, read_index
from snapshot.retention.history_keeping import KnownHistory
from snapshot.storage.counting_store import CountingStore
from snapshot.storage.local_store import LocalStore
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import CommitUnknownError, FencedError, StateBackendError
from tests.crash.disk import Image, Op, write_image
from tests.crash.recorder import Fail, Recorder
from tests.recovery.driver import JOB, Changes, State, changed, manifests_of, new_id
from tests.recovery.restore.one_subtask_job import Job

__all__ = [
    "Kind",
    "Life",
    "changes_of",
    "check_copies",
    "check_history",
    "check_store",
    "few_epochs_an_object",
    "job_on",
    "lived",
    "named",
    "reopened",
    "truths",
]

POLICY: Final = BasePolicy(every_epochs=2, apart_every_epochs=3, apart_min_bytes=1 << 30)
LONG_S: Final = 30.0


@dataclass(frozen=True)
class Kind:
    """Which life: ``files``: bases are RocksDB's own files; ``asynchronous``: commits are."""

    files: bool = False
    asynchronous: bool = False

    @property
    def whole_limit_bytes(self) -> int:
        """State up to this size has bases of one object."""
        return 0 if self.files else 1 << 20


def changes_of(epoch: int) -> Changes:
    """What an epoch changes; one in four is large enough for an object of its own."""
    large = b"%d" % epoch * (300 if epoch % 4 == 1 else 20)
    changes: dict[bytes, bytes | None] = {
        b"\0\0%d" % (epoch % 5): bytes((epoch * 37 + n * n) % 256 for n in range(90)),
        b"\0k": large,
    }
    if epoch % 3 == 2:
        changes[b"\0\0%d" % ((epoch + 2) % 5)] = None
    return changes


def truths(epochs: int) -> dict[int, State]:
    """The state after each epoch."""
    found: dict[int, State] = {-1: {}}
    for epoch in range(epochs):
        found[epoch] = changed(found[epoch - 1], changes_of(epoch))
    return found


TRUTHS: Final = truths(64)

# Else no object of the history is written in so short a life.
few_epochs_an_object = mock.patch("snapshot.retention.history_keeping.EPOCHS_AN_OBJECT", 2)


def job_on(root: Path, store: ObjectStore, kind: Kind) -> Job:
    """A started job: its driver has claimed the log."""
    return Job(
        root,
        budget=250,
        apart=True,
        store=store,
        policy=POLICY,
        whole_limit_bytes=kind.whole_limit_bytes,
        asynchronous=kind.asynchronous,
        clean_every_epochs=3,
    )


def step_of(kind: str, path: str) -> str:
    """The step of the protocol that an operation on a path belongs to."""
    parts = path.strip("/").split("/")
    if parts[0] == "store":
        if kind in ("unlink", "rmdir") and parts[1:2] != [".tmp"]:
            return "clean-up"
        folder = parts[1] if len(parts) > 1 else ""
        names = {
            "log": "record",
            "history": "history",
            "data": "large slice",
            "base": "base upload",
        }
        return names.get(folder, "temporary file of the store")
    inside = parts[5:]  # <host>/<job>/<operator>/<subtask>/<store directory>
    if kind in ("unlink", "rmdir") and inside[:1] != ["work"]:
        return "local sweep"
    if not inside or inside[0] == "lease":
        return "directory and pointer"
    names = {"deltas": "local delta", "work": "base checkpoint", "uploaded": "base checkpoint"}
    if inside[0] == "db":
        return "RocksDB" if kind == "foreign" else "download of a base"
    return names.get(inside[0].lstrip("."), "base checkpoint")


@dataclass
class Life:
    """What was recorded.

    Attributes:
        committed: (operations, epoch): from there on Spark has committed the batch.
        refused: the typed errors that it lived through.
    """

    ops: list[Op]
    kind: Kind
    committed: list[tuple[int, int]] = field(default_factory=list)
    refused: list[StateBackendError] = field(default_factory=list)

    def committed_at(self, operations: int) -> int:
        """The last batch that Spark had committed after so many operations."""
        return max((e for at, e in self.committed if at <= operations), default=-1)


class _Living:
    """Runs epochs, again where an attempt fails as it may."""

    def __init__(self, root: Path, life: Life, kind: Kind) -> None:
        self.root, self.life, self.kind = root, life, kind
        self.store = LocalStore(root / "store", new_id=new_id)
        self.job: Job | None = None

    def _new_process(self) -> None:
        """What was in doubt for a store object is not known to the next one."""
        self.store = LocalStore(self.root / "store", new_id=new_id)
        if self.job is not None:
            self.job.store, self.job.durable = self.store, CountingStore(self.store)

    def started(self) -> Job:
        for _ in range(4):
            try:
                if self.job is None:
                    self.job = job_on(self.root, self.store, self.kind)
                else:
                    last = last_epoch(self.store)
                    assert last >= self.job.epoch - (2 if self.kind.asynchronous else 1)
                    self.job.restart(min(self.job.epoch, last + 1))
                return self.job
            except StateBackendError as error:
                self.life.refused.append(error)
                self._new_process()
        raise AssertionError("the job cannot be started")

    def run(self, epochs: int, host: str) -> None:
        job = self.started()
        for _ in range(epochs):
            self._epoch(job, host)
            self.life.committed.append((len(self.life.ops), job.epoch - 1))
        job.started.session.drain(LONG_S)

    def _epoch(self, job: Job, host: str) -> None:
        for _ in range(5):
            try:
                job.run(changes_of(job.epoch), host=host)
                return
            except StateBackendError as error:
                self.life.refused.append(error)
                job.opened.directory.release() if hasattr(job, "opened") else None
                if isinstance(error, (CommitUnknownError, FencedError)) or (
                    job.started.session.failure is not None
                ):
                    self._restarted(job)
        raise AssertionError(f"epoch {job.epoch} cannot be finished: {self.life.refused[-1]}")

    def _restarted(self, job: Job) -> None:
        """A new driver; Spark goes on behind what the log has, at most a batch back."""
        job.started.session.drain(LONG_S)
        self._new_process()
        self.started()


@few_epochs_an_object
def lived(root: Path, kind: Kind, fail: Fail | None = None, epochs: int = 4) -> Life:
    """A job's life, recorded; it goes on through failures that are typed."""
    root.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(root, step_of, fail)
    life = Life(recorder.ops, kind)
    with recorder:
        living = _Living(root, life, kind)
        living.run(epochs, "h")
        living.run(epochs, "h")  # another driver
        living.run(epochs, "g")  # another host: from the durable copy
    return life


def last_epoch(store: ObjectStore) -> int:
    """The newest epoch that the log has; -1 for none."""
    resolved = resolve(manifests_of(store))
    return resolved["op"].last_epoch if resolved else -1


def named(store: ObjectStore, job: str = JOB) -> set[str]:
    """Every object that the live records name, each of them there."""
    names: set[str] = set()
    for manifest in manifests_of(store, job):
        for entry in manifest.slices:
            names.update([entry.object] if entry.object else [])
            if entry.kind == "files":
                index = read_index(store, manifest.sequence, entry)
                names.update(file.object for file in index.files)
    there = {info.name for info in store.list("")}
    assert names <= there, f"gone: {sorted(names - there)}"
    return names


def check_history(store: ObjectStore, job: str = JOB, begun_with: int = 0) -> None:
    """Whatever was cut while records were summed up and deleted: each epoch is told of.

    Args:
        begun_with: the first epoch that it has of a savepoint.
    """
    found = read_history(store, job, limit=1000)
    assert not found.problems, found.problems
    told = sorted(one.epoch for one in found.checkpoints if one.status == "complete")
    first = min(m.first_epoch for m in manifests_of(store, job) if m.kind == "checkpoint")
    first = max(first, begun_with)
    assert found.newest_epoch is not None
    assert told == list(range(first, found.newest_epoch + 1)), told


def check_store(store: ObjectStore, job: str = JOB, begun_with: int = 0) -> None:
    """After a cleaning by somebody else: no garbage of an earlier generation, no old record."""
    log = CommitLog(store, job=job, writer="cleaner", new_id=new_id)
    history = KnownHistory(outside=True)
    clean(store, lambda: outside_view(store, log), prefixes=ALL_PREFIXES, history=history)
    check_history(store, job, begun_with)
    tip, live = manifests_of(store, job)[-1], named(store, job)
    for info in store.list(""):
        parsed = parse_data_name(info.name) or parse_base_name(info.name)
        if info.name.startswith(HISTORY_PREFIX):
            continue
        if parsed is not None:
            assert info.name in live or parsed.generation == tip.generation, info.name
        else:
            sequence = parse_record_name(info.name)
            assert sequence is not None, info.name
            if sequence < tip.oldest_needed:
                assert log.read(sequence).kind == "claim"


def check_copies(subtask: Path) -> None:
    """On a host there is one local copy, and nothing that nobody will ever remove."""
    current = (subtask / "current").read_text()
    left = {path.name for path in subtask.iterdir()} - {"current", current}
    assert not left, f"left in {subtask}: {sorted(left)}"
    here = subtask / current
    for folder in (here / "deltas", here / "work"):
        kept = [path.name for path in folder.iterdir()] if folder.exists() else []
        assert all(name.partition("-")[0].isdigit() for name in kept), f"left: {kept}"
    # The one temporary file that the next upload writes over.
    assert not [path.name for path in here.iterdir() if path.name.startswith(".")][1:]


@few_epochs_an_object
def reopened(image: Image, root: Path, kind: Kind, committed: int) -> None:
    """Start the job on what a disk held after a cut, and check what it gives.

    Args:
        root: a folder that does not exist yet.
        committed: the last batch that Spark has committed.

    Raises:
        AssertionError: something that was acknowledged is lost, wrong, or left for ever.
    """
    write_image(image, root)
    store = LocalStore(root / "store", new_id=new_id)
    named(store)
    last = last_epoch(store)
    # Spark has committed the batch before the one that runs, and goes back by that at most.
    assert last >= committed - (1 if kind.asynchronous else 0), f"epoch {committed} is lost"
    job = job_on(root, store, kind)
    job.truth = dict(TRUTHS)
    job.restart(min(committed, last) + 1)
    for host in ("h", "g", "elsewhere"):
        job.open(host).directory.release()  # compares marker and content
    for host in ("h", "g"):
        job.run(changes_of(job.epoch), host=host)
        check_copies(root / host / JOB / "op" / "0-7")
    job.started.session.drain(LONG_S)
    job.started.session.cleaner.drain(LONG_S)  # it may be writing an object of the history
    named(store)
    job.restart()
    check_store(store)
    left = [path.name for path in (root / "store" / ".tmp").iterdir()]
    assert not left, f"left in .tmp: {left}"
    assert job.truth == TRUTHS
