"""A savepoint's life after it was made: deleted, replaced, gone, and asked for an epoch before."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from recovery.decide.start_batch import LocationProgress
from recovery.inspect.verify import verify
from recovery.savepoints.begin_with_savepoint import left_in_the_middle, standing
from recovery.savepoints.create_savepoint import create_savepoint
from recovery.savepoints.savepoint import (
    BEGUN_NAME,
    SAVEPOINT_NAME,
    Begun,
    Savepoint,
    read_savepoint,
)
from recovery.savepoints.savepoint_folder import delete_savepoint
from recovery.savepoints.savepoint_list import list_savepoints
from recovery.savepoints.verify_savepoint import verify_savepoint
from snapshot.formats.record import Manifest
from snapshot.protocol.lineage import resolve
from snapshot.storage.local_store import LocalStore
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.object_store import CreateOutcome
from statebackend.errors import (
    CheckpointLocationError,
    FencedError,
    NotRestorableError,
    StoreUnreachableError,
)
from statebackend.runtime.driver.job import Job
from statebackend.spark.start.query_from_savepoint import begin_with, has_begun
from tests.cli import folder
from tests.recovery import driver
from tests.recovery.driver import JOB, new_id
from tests.recovery.savepoints.saved_jobs import (
    Cut,
    Location,
    Stand,
    begun,
    cutting,
    log_of,
    ran,
    restored,
    saved,
)


def test_one_that_fails_leaves_another_in_its_place_alone() -> None:
    """Deleted by hand while it was made, and made again in the same folder."""
    stand = Stand().run(4)
    target = MemoryStore(new_id())
    others: list[Savepoint] = []

    def tick(size_bytes: int) -> None:
        if not others:
            delete_savepoint(target)
            others.append(create_savepoint(stand.making(open_target=lambda _: target)))
            raise StoreUnreachableError("It took too long.", todo="Try again.")

    with pytest.raises(StoreUnreachableError):
        create_savepoint(stand.making(open_target=lambda _: target, tick=tick))
    assert read_savepoint(target).id == others[0].id
    assert verify(target, folder.JOB).ok


class DeletedWhenClaimed(MemoryStore):
    """A savepoint's folder that somebody deletes once its log is claimed."""

    def __init__(self, *, again: bool) -> None:
        super().__init__(new_id())
        self.again = again

    def create(self, name: str, chunks: Iterable[bytes]) -> CreateOutcome:
        """As in `ObjectStore`."""
        outcome = super().create(name, chunks)
        if name.startswith("log/"):
            delete_savepoint(self)
            if self.again:
                super().create(BEGUN_NAME, [b"of another"])
        return outcome


@pytest.mark.parametrize("again", [False, True])
def test_one_that_is_deleted_while_it_is_claimed_is_said_to_be_gone(*, again: bool) -> None:
    target = DeletedWhenClaimed(again=again)
    with pytest.raises(NotRestorableError, match="was deleted while it was made") as said:
        create_savepoint(Stand().run(3).making(open_target=lambda _: target))
    assert target.uri in str(said.value)
    assert "and another one begun there" in str(said.value) or not again
    assert "Make it again" in str(said.value)
    if again:
        assert target.get(BEGUN_NAME) == b"of another"


def test_an_epoch_that_can_be_restored_has_its_states_of_no_key() -> None:
    store, location = MemoryStore(new_id()), Location()
    ran(driver.Started(store, {"op": 2}), location, 4, operator_state=True)
    made, target = saved(store, location)
    clone = MemoryStore(new_id())
    begun(clone, target, JOB)
    original = resolve(driver.manifests_of(store))["op"]
    for copy in (target, clone):
        lineage = resolve(driver.manifests_of(copy))["op"]
        for epoch in (made.epoch - 1, made.epoch):
            if lineage.is_known(epoch):
                lists = lineage.epochs[epoch].lists
                assert sorted(lists) == sorted(original.epochs[epoch].lists)


def test_delete_leaves_a_job_whose_name_is_a_folders() -> None:
    _, target = Stand().run(3).save()
    others = ["data/log/00000000000000000000.ckpt", "base/notes.txt"]
    for name in others:
        target.put(name, [b"of somebody else"])
    assert sorted(delete_savepoint(target)) == sorted(others)
    assert sorted(info.name for info in target.list("")) == sorted(others)


class Files:
    """A checkpoint location as `begin_with` uses it."""

    def __init__(self) -> None:
        self.path = "a location"
        self.data: dict[str, bytes] = {}

    def progress(self) -> LocationProgress:
        commits = [int(name[8:]) for name in self.data if name.startswith("commits/")]
        said = self.data.get("metadata")
        query_id = json.loads(said)["id"] if said else None
        return LocationProgress(self.path, query_id, -1, max(commits, default=-1))

    def files(self, folder: str) -> list[str]:
        return [name for name in self.data if name.startswith(f"{folder}/")]

    def chunks(self, name: str) -> Iterator[bytes]:
        yield self.data[name]

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        self.data[name] = b"".join(pieces)


class Clone:
    """A job that began with a savepoint, and went on."""

    def __init__(self, root: Path) -> None:
        source, location = LocalStore(str(root / "original"), new_id=new_id), Location()
        ran(driver.Started(source, {"op": 2}), location, 4)
        self.savepoint = LocalStore(str(root / "savepoint"), new_id=new_id)
        making = Stand().making(
            store=source,
            job=JOB,
            location=location.files(),
            manifests=lambda: driver.manifests_of(source),
        )
        create_savepoint(replace(making, open_target=lambda _: self.savepoint))
        self.uri, self.location = f"file://{root}/savepoint", Files()
        self.state = f"file://{root}/state"
        job = self.job()
        self.begin(self.location)
        ran(driver.Started(job.store, {"op": 2}, first_epoch=4), location, 6)

    def job(self) -> Job:
        return Job(self.state, JOB)

    def begin(self, location: Files) -> None:
        begin_with(self.uri, self.job(), location, lambda manifests: None)  # type: ignore[arg-type]


def test_a_job_that_has_begun_needs_its_savepoint_no_more(tmp_path: Path) -> None:
    clone = Clone(tmp_path)
    delete_savepoint(clone.savepoint)
    assert has_begun(clone.uri, clone.job(), clone.location)  # type: ignore[arg-type]
    assert not has_begun(clone.uri, clone.job(), Files())  # type: ignore[arg-type]
    assert not has_begun(f"{clone.uri}-2", clone.job(), clone.location)  # type: ignore[arg-type]
    with pytest.raises(NotRestorableError):
        clone.begin(Files())


def test_a_job_that_went_on_is_given_no_second_location(tmp_path: Path) -> None:
    clone, other = Clone(tmp_path), Files()
    with pytest.raises(CheckpointLocationError, match="has gone on"):
        clone.begin(other)
    assert other.data == {}


def test_what_is_written_after_it_was_deleted_makes_no_savepoint() -> None:
    """A put that was taken for lost may arrive late."""
    _, target = Stand().run(3).save()
    late = target.get(SAVEPOINT_NAME)
    delete_savepoint(target)
    target.put(SAVEPOINT_NAME, [late])
    with pytest.raises(NotRestorableError):
        read_savepoint(target)
    assert not any(one.complete for one in list_savepoints(target, lambda _, t=target: t))
    delete_savepoint(target)
    assert list(target.list("")) == []


def test_what_is_written_while_it_is_deleted_makes_no_savepoint() -> None:
    """A deletion that was cut anywhere, and then the put that was taken for lost."""
    _, whole = Stand().run(3).save()
    late = whole.get(SAVEPOINT_NAME)
    for calls in itertools.count():
        target = MemoryStore(new_id())
        for info in whole.list(""):
            target.put(info.name, [whole.get(info.name)])
        try:
            delete_savepoint(cutting(target, calls, verbs=("put", "delete")))
        except Cut:
            if calls == 0:
                assert read_savepoint(target)
                continue
            target.put(SAVEPOINT_NAME, [late])
            with pytest.raises(NotRestorableError):
                read_savepoint(target)
            assert not any(one.complete for one in list_savepoints(target, lambda _, t=target: t))
            delete_savepoint(target)
            assert list(target.list("")) == []
        else:
            break
    assert calls > 3


def test_a_mark_of_deletion_that_lands_when_all_is_gone_is_no_savepoint() -> None:
    _, target = Stand().run(3).save()
    begun_ = msgspec.json.decode(target.get(BEGUN_NAME), type=Begun)
    delete_savepoint(target)
    target.put(BEGUN_NAME, [msgspec.json.encode(msgspec.structs.replace(begun_, deleted=True))])
    assert list_savepoints(target, lambda name: target) == []
    delete_savepoint(target)
    assert list(target.list("")) == []


def test_a_mark_of_deletion_that_lands_late_takes_nothing_from_the_next_savepoint() -> None:
    _, first = Stand().run(3).save()
    mark = msgspec.json.decode(first.get(BEGUN_NAME), type=Begun)
    _, target = Stand().run(4).save()
    target.put(BEGUN_NAME, [msgspec.json.encode(msgspec.structs.replace(mark, deleted=True))])
    assert read_savepoint(target).epoch == 3
    late = first.get(SAVEPOINT_NAME)
    delete_savepoint(target)
    _, target = Stand().run(4).save()
    target.put(SAVEPOINT_NAME, [late])  # of another, onto this one's objects
    with pytest.raises(NotRestorableError):
        read_savepoint(target)


class LateStore(MemoryStore):
    """Its n-th create does not return, and lands only just before the next one."""

    def __init__(self, calls: int) -> None:
        super().__init__(new_id())
        self._left: int | None = calls
        self._held: tuple[str, bytes] | None = None

    def create(self, name: str, chunks: Iterable[bytes]) -> CreateOutcome:
        """As in `ObjectStore`."""
        data = b"".join(chunks)
        if self._held is not None:
            late, self._held = self._held, None
            super().create(late[0], [late[1]])
        if self._left == 0:
            self._left, self._held = None, (name, data)
            raise Cut
        if self._left is not None:
            self._left -= 1
        return super().create(name, [data])


def test_a_beginning_whose_last_write_comes_late_ends_as_one() -> None:
    """Two tries, the second one while the first one's last write is still on its way."""
    stand = Stand().run(4)
    savepoint, source = stand.save()
    for calls in itertools.count():
        store = LateStore(calls)
        ended = False
        for _ in range(3):
            try:
                query_id = begun(store, source)
            except (Cut, FencedError):
                continue
            ended = True
            break
        assert ended
        log = log_of(store, "clone")
        assert standing(log, "clone", savepoint).query_id == query_id
        assert not left_in_the_middle(log.manifests())
        assert log.manifests()[-1].query_id == query_id
        assert restored(store, 3, "clone") == stand.folder.state[3]
        if store._left is not None:
            break
    assert calls > 4


def test_a_batch_that_is_evaluated_again_meanwhile_is_looked_at_again() -> None:
    store, location = MemoryStore(new_id()), Location()
    ran(driver.Started(store, {"op": 1}), location, 3)
    looks = iter(range(10))

    def manifests() -> list[Manifest]:
        if next(looks) == 1:  # between the look at the log and the end of that at the location
            again = driver.Started(store, {"op": 1}, first_epoch=2)
            ran_again(again)
        return driver.manifests_of(store)

    making = Stand().making(store=store, job=JOB, location=location.files(), manifests=manifests)
    target = MemoryStore(new_id())
    made = create_savepoint(replace(making, open_target=lambda _: target))
    newest = resolve(driver.manifests_of(store))["op"].subtasks[0].chain_at(2)
    assert made.epoch == 2
    assert resolve(driver.manifests_of(target))["op"].subtasks[0].chain_at(2) == newest


def ran_again(started: driver.Started) -> None:
    """Epoch 2 once more, with other rows."""
    reply, _ = started.session.begin(driver.begin_of(2))
    started.session.ack(driver.ack_of(reply.chain, driver.part_of({b"\0\0k": b"other"}), 2))


def test_a_check_reads_what_spark_needs_and_the_epoch_too() -> None:
    _, target = Stand().run(3).save()
    assert verify_savepoint(target).ok
    name = next(info.name for info in target.list("spark/offsets/"))
    whole = target.get(name)
    target.put(name, [whole[:-1]])
    assert [one.object for one in verify_savepoint(target).findings] == [name]
    target.delete([name])
    assert [one.object for one in verify_savepoint(target).findings] == [name]
    target.put(name, [whole])
    records = sorted(info.name for info in target.list("log/"))
    target.delete([records[-1]])
    assert not verify_savepoint(target).ok
