"""Savepoints without Spark: made of a job's folder and a checkpoint location, and begun with."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3

from recovery.inspect.describe import describe
from recovery.inspect.jobs import BEGUN_NAME, SAVEPOINT_NAME, split_jobs
from recovery.inspect.verify import verify
from recovery.savepoints.claim import (
    Standing,
    begin_job,
    left_in_the_middle,
    saved_state,
    standing,
)
from recovery.savepoints.create import Making, create_savepoint
from recovery.savepoints.location_part import StoreLocation
from recovery.savepoints.savepoint import (
    Savepoint,
    below,
    default_folder,
    delete_savepoint,
    list_savepoints,
    read_savepoint,
    savepoints_folder,
)
from snapshot.formats.record import record_name
from snapshot.log.commit_log import CommitLog
from snapshot.protocol.lineage import resolve
from snapshot.protocol.messages import SlicePart
from snapshot.storage.local_store import LocalStore
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.open import open_store
from snapshot.storage.uris import parse_s3_uri
from statebackend.errors import (
    CheckpointLocationError,
    CorruptionError,
    NotRestorableError,
    SettingError,
    StateBackendError,
    StoreUnreachableError,
    UnsupportedFormatError,
    UnsupportedQueryError,
)
from statebackend.runtime.driver.job_start import specs_of
from statebackend.state.operator_state import StoredList, encode_lists
from tests.cli.folder import JOB, OPERATOR, Folder, new_id
from tests.recovery import driver
from tests.support.failing_store import FailingStore

QUERY = "11111111-2222-3333-4444-555555555555"
FILE_ENTRY = '{"path":"file:///in/%d.json","timestamp":1,"batchId":%d,"action":"add"}'


class Location:
    """A checkpoint location of one file source, which gave one file in each batch."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.store = store or MemoryStore(new_id())
        self.put("metadata", json.dumps({"id": QUERY}))
        self.next_batch = 0

    def put(self, name: str, text: str) -> None:
        self.store.put(name, [text.encode()])

    def batches(self, count: int, *, committed: bool = True) -> Location:
        for batch in range(self.next_batch, self.next_batch + count):
            self.put(f"sources/0/{batch}", "v1\n" + FILE_ENTRY % (batch, batch))
            head = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": batch})
            self.put(f"offsets/{batch}", f'v1\n{head}\n{{"logOffset":{batch}}}')
            if committed:
                self.put(f"commits/{batch}", 'v1\n{"nextBatchWatermarkMs":0}')
        self.next_batch += count
        return self

    def files(self) -> StoreLocation:
        return StoreLocation(self.store)


class Stand:
    """One job with its location, and the savepoints that are made of it."""

    def __init__(self, job: Any = None) -> None:
        self.folder = Folder(job if job is not None else MemoryStore(new_id()))
        self.location = Location()
        self.targets: list[MemoryStore] = []

    def run(self, epochs: int, **how: Any) -> Stand:
        self.folder.epochs(epochs, **how)
        self.location.batches(epochs)
        return self

    def target(self, savepoint_id: str) -> MemoryStore:
        self.targets.append(MemoryStore(new_id()))
        return self.targets[-1]

    def making(self, **other: Any) -> Making:
        store = self.folder.store
        given = {
            "store": store,
            "job": JOB,
            "location": self.location.files(),
            "manifests": lambda: log_of(store).manifests(),
            "open_target": self.target,
            "new_id": new_id,
            "now_ms": lambda: 1_700_000_000_000,
            "writer": "test",
            **other,
        }
        return Making(**given)

    def save(self, **other: Any) -> tuple[Savepoint, MemoryStore]:
        return create_savepoint(self.making(**other)), self.targets[-1]


def log_of(store: Any, job: str = JOB) -> CommitLog:
    return CommitLog(store, job=job, writer="reader", new_id=new_id)


def restored(store: Any, epoch: int, job: str = JOB) -> Any:
    """The state that a folder gives, read slice by slice."""
    reader = Folder.__new__(Folder)
    reader.store, reader.job, reader.operator = store, job, OPERATOR
    reader.log = log_of(store, job)
    reader.tenure = None  # type: ignore[assignment]
    return reader.restored(epoch)


def begun(store: Any, source: Any, job: str = "clone") -> str:
    """A job that begins with a savepoint, as a start does it; the query's id."""
    savepoint = read_savepoint(source)
    log = log_of(store, job)
    found = standing(log, job, savepoint)
    if found.standing is Standing.BEGUN:
        return found.query_id
    state = saved_state(source, savepoint, log_of(source, savepoint.job))
    query_id = f"query of {new_id()}"
    begin_job(
        state, savepoint, source, store, log, after=found.last, query_id=query_id, new_id=new_id
    )
    return query_id


SHAPES: list[dict[str, Any]] = [
    {},
    {"own": True},
    {"base": "base"},
    {"base": "files"},
    {"own": True, "base": "files"},
]


@pytest.mark.parametrize("how", SHAPES, ids=str)
def test_a_savepoint_is_a_jobs_folder_with_the_state_of_its_epoch(how: dict[str, Any]) -> None:
    stand = Stand().run(5).run(3, **how).run(2)
    savepoint, target = stand.save()
    assert savepoint.epoch == 9
    assert restored(target, 9) == stand.folder.state[9]
    report = verify(target, JOB)
    assert report.ok, report.findings
    assert describe(target, JOB).operators[0].uid == OPERATOR
    assert read_savepoint(target) == savepoint
    (operator,) = savepoint.operators
    assert (operator.uid, operator.parallelism, operator.max_parallelism) == (OPERATOR, 2, 8)
    assert savepoint.query_id == QUERY


@pytest.mark.parametrize("how", SHAPES, ids=str)
def test_it_owns_its_bytes(how: dict[str, Any]) -> None:
    """Whatever becomes of the job."""
    stand = Stand().run(3).run(2, **how)
    _, target = stand.save()
    names = [info.name for info in stand.folder.store.list("")]
    stand.folder.store.delete(names)
    assert restored(target, 4) == stand.folder.state[4]
    assert begun(MemoryStore(new_id()), target)


@pytest.mark.parametrize("how", SHAPES, ids=str)
def test_two_jobs_begin_with_it_and_go_on_apart(how: dict[str, Any]) -> None:
    stand = Stand().run(3).run(2, **how)
    _, target = stand.save()
    for name in ("one", "two"):
        store = MemoryStore(new_id())
        begun(store, target, name)
        assert restored(store, 4, name) == stand.folder.state[4]
        clone = Folder(store, job=name)
        clone.state, clone.next_epoch = {4: stand.folder.state[4]}, 5
        clone.epochs(3, **how)
        assert clone.restored(7) == clone.state[7]
        report = verify(store, name)
        assert report.ok, report.findings
        again = stand.making(
            store=store,
            job=name,
            location=Location().batches(8).files(),
            manifests=lambda s=store, n=name: log_of(s, n).manifests(),
        )
        assert create_savepoint(again).epoch == 7
        assert restored(stand.targets[-1], 7, name) == clone.state[7], "a savepoint of the clone"
    assert restored(target, 4) == stand.folder.state[4]


def test_only_what_the_epoch_needs_is_copied() -> None:
    stand = Stand().run(20).run(1, base="base").run(3)
    savepoint, target = stand.save()
    assert savepoint.records == 4, "from the bases of epoch 19 on: 20 to 23"
    assert len(log_of(target).manifests()) == 5
    assert restored(target, 23) == stand.folder.state[23]


def test_the_epoch_is_the_newest_that_spark_has_committed() -> None:
    stand = Stand().run(3)
    stand.folder.epoch()  # durable, and not committed by Spark
    stand.location.batches(1, committed=False)
    savepoint, target = stand.save()
    assert savepoint.epoch == 2
    assert restored(target, 2) == stand.folder.state[2]
    assert {file.name for file in savepoint.spark} == {
        "metadata",
        *("offsets/1", "offsets/2", "commits/2"),
        *("sources/0/0", "sources/0/1", "sources/0/2"),
    }


def test_a_base_that_a_later_record_names_is_part_of_it() -> None:
    """It was made while the next epoch ran, and older records may be gone since."""
    stand = Stand().run(4)
    stand.folder.epoch(base="base")  # of the state after epoch 3
    stand.location.batches(1, committed=False)
    tip = log_of(stand.folder.store).manifests()[-1]
    needed = [m for m in log_of(stand.folder.store).manifests() if m.sequence >= tip.sequence - 1]
    savepoint, target = stand.save(
        manifests=lambda: [msgspec.structs.replace(m, oldest_needed=0) for m in needed]
    )
    assert savepoint.epoch == 3
    assert restored(target, 3) == stand.folder.state[3]


def test_with_several_operators_all_stand_at_one_epoch() -> None:
    store = MemoryStore(new_id())
    started = driver.Started(store, {"a": 2, "b": 1})
    location = Location()
    ran(started, location, 3)
    made, target = saved(store, location)
    assert made.epoch == 2
    assert [(one.uid, one.epoch) for one in made.operators] == [("a", 2), ("b", 2)]
    assert verify(target, driver.JOB).ok


def ran(
    started: driver.Started, location: Location, epochs: int, *, operator_state: bool = False
) -> None:
    """Epochs of all operators, each committed by Spark."""
    for epoch in range(location.next_batch, location.next_batch + epochs):
        for uid, parallelism in started.parallelism.items():
            for subtask in range(parallelism):
                reply, _ = started.session.begin(driver.begin_of(epoch, subtask, uid))
                part = driver.part_of({b"k%d" % epoch: b"%s %d" % (uid.encode(), subtask)})
                base = driver.base_of({b"k%d" % epoch: b"all"}) if reply.base_due else None
                ack = driver.ack_of(reply.chain, part, epoch, subtask, uid, base=base)
                if operator_state:
                    ack = msgspec.structs.replace(ack, operator_state=lists_of(epoch))
                started.session.ack(ack)
        location.batches(1)


def lists_of(epoch: int) -> SlicePart:
    field = {"name": "x", "type": "integer", "nullable": True, "metadata": {}}
    schema = {"type": "struct", "fields": [field]}
    stored = StoredList(mode="split", schema=json.dumps(schema), version=1)
    data = encode_lists({f"of epoch {epoch}": stored})
    return SlicePart(digest=blake3(data).hexdigest(), size_bytes=len(data), rows=0, data=data)


def saved(store: MemoryStore, location: Location) -> tuple[Savepoint, MemoryStore]:
    making = Stand().making(
        store=store,
        job=driver.JOB,
        location=location.files(),
        manifests=lambda: driver.manifests_of(store),
    )
    target = MemoryStore(new_id())
    return create_savepoint(replace(making, open_target=lambda _: target)), target


def chains(store: MemoryStore, epoch: int) -> dict[str, list[str | None]]:
    """Equal lineage digests mean equal state."""
    lineages = resolve(driver.manifests_of(store))
    return {uid: [s.chain_at(epoch) for s in one.subtasks] for uid, one in lineages.items()}


@pytest.mark.parametrize("base_every_epochs", [2, 64])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (1, 8)])
def test_of_a_job_that_was_rescaled(before: int, after: int, base_every_epochs: int) -> None:
    store, location = MemoryStore(new_id()), Location()
    for parallelism, epochs in ((before, 5), (after, 3)):
        started = driver.Started(
            store,
            {"op": parallelism},
            first_epoch=location.next_batch,
            base_every_epochs=base_every_epochs,
        )
        ran(started, location, epochs)
    made, target = saved(store, location)
    (operator,) = made.operators
    assert (operator.parallelism, made.epoch) == (after, 7)
    clone = MemoryStore(new_id())
    begun(clone, target, driver.JOB)
    for copy in (target, clone):
        assert chains(copy, 7) == chains(store, 7)
        report = verify(copy, driver.JOB)
        assert report.ok, report.findings
    ran(driver.Started(clone, {"op": before}, first_epoch=8), location, 2)
    assert verify(clone, driver.JOB).ok


def test_states_of_no_key_go_along() -> None:
    store, location = MemoryStore(new_id()), Location()
    ran(driver.Started(store, {"op": 2}), location, 3, operator_state=True)
    _, target = saved(store, location)
    clone = MemoryStore(new_id())
    begun(clone, target, driver.JOB)
    for copy in (target, clone):
        last = driver.manifests_of(copy)
        kept = [e for m in last for e in m.slices if e.kind == "operator" and e.epoch == 2]
        assert [entry.subtask for entry in kept] == [0, 1]
        assert verify(copy, driver.JOB).ok


# --- what is refused -----------------------------------------------------------------------------


def test_without_a_finished_batch_there_is_nothing_to_save() -> None:
    with pytest.raises(NotRestorableError, match="nothing to save"):
        Stand().save()


def test_state_of_sparks_own_operators_is_not_carried() -> None:
    stand = Stand().run(2)
    stand.location.put("state/0/0/1.delta", "x")
    with pytest.raises(UnsupportedQueryError, match="state"):
        stand.save()
    assert not stand.targets, "nothing was written"


def test_a_location_of_no_query_is_refused() -> None:
    stand = Stand().run(2)
    stand.location.store.delete(["metadata"])
    with pytest.raises(CheckpointLocationError, match="metadata"):
        stand.save()
    assert not stand.targets[-1].list("")


def test_a_plan_of_another_form_is_refused() -> None:
    stand = Stand().run(2)
    stand.location.put("offsets/1", "v2\n{}\n{}")
    with pytest.raises(UnsupportedFormatError, match="v2"):
        stand.save()


def test_a_folder_that_is_used_is_refused() -> None:
    stand = Stand().run(2)
    _, target = stand.save()
    before = target.list("")
    with pytest.raises(SettingError, match="lies there already"):
        stand.save(open_target=lambda _: target)
    assert target.list("") == before


def test_a_folder_in_which_a_probe_was_cut_takes_a_savepoint() -> None:
    stand, target = Stand().run(2), MemoryStore()
    target.put("probe/7f", [b"7f"])
    create_savepoint(stand.making(open_target=lambda _: target))
    assert read_savepoint(target).epoch == 1
    assert not delete_savepoint(target)
    assert not target.list("")


def test_a_damaged_object_makes_no_savepoint() -> None:
    stand = Stand().run(2, own=True)
    name = stand.folder.store.list("data/")[0].name
    stand.folder.store.put(name, [b"other bytes"])
    with pytest.raises(CorruptionError, match=name):
        stand.save()
    assert not stand.targets[-1].list(""), "what was copied went"


def test_a_cleaning_by_somebody_else_has_it_try_again() -> None:
    stand = Stand().run(2, own=True)
    lost = stand.folder.store.list("data/")[0].name
    body = stand.folder.store.get(lost)
    stand.folder.store.delete([lost])

    def open_target(savepoint_id: str) -> MemoryStore:
        if stand.targets:  # the second try
            stand.folder.store.put(lost, [body])
        return stand.target(savepoint_id)

    savepoint, target = stand.save(open_target=open_target)
    assert (savepoint.epoch, len(stand.targets)) == (1, 2)
    assert not stand.targets[0].list("")
    assert restored(target, 1) == stand.folder.state[1]


# --- file sources --------------------------------------------------------------------------------


def test_a_file_sources_log_goes_along_up_to_its_offset() -> None:
    stand = Stand().run(25)
    entries = "\n".join(FILE_ENTRY % (n, n) for n in range(20))
    stand.location.put("sources/0/19.compact", f"v1\n{entries}")
    stand.location.store.delete([f"sources/0/{n}" for n in range(20)])
    stand.location.put("sources/0/25", "v1\n" + FILE_ENTRY % (25, 25))  # read, not yet planned
    savepoint, target = stand.save()
    logs = [file.name for file in savepoint.spark if file.name.startswith("sources/")]
    assert logs == ["sources/0/19.compact", *(f"sources/0/{n}" for n in range(20, 25))]
    assert target.get("spark/sources/0/24") == stand.location.store.get("sources/0/24")


def test_a_file_sources_log_with_a_gap_is_refused() -> None:
    stand = Stand().run(3)
    stand.location.store.delete(["sources/0/1"])
    with pytest.raises(NotRestorableError, match="no entry 1"):
        stand.save()


def test_what_other_sources_keep_goes_along_whole() -> None:
    stand = Stand().run(1)
    head = json.dumps({"batchWatermarkMs": 0})
    stand.location.put("offsets/0", f'v1\n{head}\n{{"logOffset":0}}\n{{"topic":{{"0":7}}}}\n-')
    stand.location.put("sources/1/0", 'v1\n{"topic":{"0":0}}')
    stand.location.put("sources/2/0", "v1\n" + FILE_ENTRY % (0, 0))  # nothing planned of it yet
    savepoint, _ = stand.save()
    logs = [file.name for file in savepoint.spark if file.name.startswith("sources/")]
    assert logs == ["sources/0/0", "sources/1/0"]


# --- list, describe, delete ----------------------------------------------------------------------


def test_list_shows_what_was_never_finished_and_delete_removes_it(tmp_path: Path) -> None:
    uri = (tmp_path / "jobs").as_uri()
    stand = Stand().run(2)
    folder = savepoints_folder(uri)

    def opened(at: str) -> Any:
        return open_store(at, new_id=new_id)

    good = create_savepoint(
        stand.making(open_target=lambda name: opened(default_folder(uri, JOB, name)))
    )
    broken = opened(default_folder(uri, JOB, "broken"))

    def stop(size_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create_savepoint(stand.making(open_target=lambda _: broken, tick=stop))
    found = list_savepoints(opened(folder), lambda name: opened(below(folder, name)), job=JOB)
    assert {(one.uri, one.complete, one.epoch) for one in found} == {
        (good.uri, True, 1),
        (broken.uri, False, None),
    }
    with pytest.raises(NotRestorableError, match="never finished"):
        read_savepoint(broken)
    assert split_jobs(uri, opened(uri).list("")) == {}, "no job"
    for one in found:
        assert delete_savepoint(opened(one.uri)) == []
        assert opened(one.uri).list("") == []
    assert list_savepoints(opened(folder), lambda name: opened(below(folder, name))) == []


def test_a_savepoint_beside_the_jobs_is_no_job(tmp_path: Path) -> None:
    uri = (tmp_path / "jobs").as_uri()
    stand = Stand(open_store(f"{uri}/clicks", new_id=new_id)).run(2)
    made = open_store(f"{uri}/saved", new_id=new_id)
    create_savepoint(stand.making(open_target=lambda _: made))
    listing = open_store(uri, new_id=new_id).list("")
    assert list(split_jobs(uri, listing)) == ["clicks"]
    made.delete([SAVEPOINT_NAME])  # being deleted, or never finished
    listing = open_store(uri, new_id=new_id).list("")
    assert list(split_jobs(uri, listing)) == ["clicks"]


def test_delete_takes_nothing_but_a_savepoint() -> None:
    stand = Stand().run(2)
    before = stand.folder.store.list("")
    with pytest.raises(NotRestorableError, match="nothing is deleted"):
        delete_savepoint(stand.folder.store)
    assert stand.folder.store.list("") == before
    _, target = stand.save()
    target.put("notes.txt", [b"mine"])
    assert delete_savepoint(target) == ["notes.txt"]
    assert [info.name for info in target.list("")] == ["notes.txt"]


def test_a_deletion_may_be_cut_anywhere() -> None:
    stand = Stand().run(2, own=True)
    for calls in itertools.count():
        _, target = stand.save()
        left = itertools.count(calls, -1)

        def plan(verb: str, name: str, number: int, left: Any = left) -> Any:
            return "before" if verb == "delete" and next(left) <= 0 else None

        try:
            delete_savepoint(FailingStore(target, plan))
        except StoreUnreachableError:
            if calls:
                with pytest.raises(NotRestorableError):
                    read_savepoint(target)
            delete_savepoint(target)
            assert not target.list("")
        else:
            break
    assert calls >= 3


def test_every_flipped_byte_of_savepoint_json_is_found() -> None:
    stand = Stand().run(1)
    _, target = stand.save()
    data = target.get(SAVEPOINT_NAME)
    for at in range(0, len(data), 7):
        target.put(SAVEPOINT_NAME, [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]])
        with pytest.raises((CorruptionError, UnsupportedFormatError)):
            read_savepoint(target)


# --- cuts ----------------------------------------------------------------------------------------


class Cut(BaseException):
    """The process ends here."""


def cutting(inner: Any, calls: int, verbs: tuple[str, ...] = ("put", "create", "put_file")) -> Any:
    """A store before whose n-th write the process ends; and one after it."""
    left = itertools.count(calls, -1)

    def plan(verb: str, name: str, number: int) -> Any:
        return Cut() if verb in verbs and next(left) <= 0 else None

    return FailingStore(inner, plan)


def test_a_creation_that_is_cut_anywhere_leaves_no_savepoint() -> None:
    stand = Stand().run(2, own=True).run(2, base="files")
    for calls in itertools.count():
        target = MemoryStore(new_id())
        try:
            create_savepoint(stand.making(open_target=lambda _, t=target, n=calls: cutting(t, n)))
        except Cut:
            with pytest.raises(NotRestorableError):
                read_savepoint(target)
            if target.list(""):
                assert [i.name for i in target.list("") if i.name == BEGUN_NAME]
                delete_savepoint(target)
            assert not target.list("")
        else:
            break
    assert calls > 15
    assert verify(target, JOB).ok


@pytest.mark.parametrize("how", [{"own": True}, {"base": "files"}], ids=str)
@pytest.mark.parametrize("answers_lost", [False, True])
def test_a_beginning_that_is_cut_anywhere_is_repeated(
    how: dict[str, Any], answers_lost: bool
) -> None:
    stand = Stand().run(2).run(3, **how)
    savepoint, source = stand.save()
    for calls in itertools.count():
        store = MemoryStore(new_id())
        done = False
        for attempt in (calls, calls // 2, 10**9):
            first = standing(log_of(store, "clone"), "clone", savepoint).standing
            assert first in (Standing.NEW, Standing.CUT)
            try:
                begun(losing(store, attempt) if answers_lost else cutting(store, attempt), source)
            except (Cut, StateBackendError):
                log = log_of(store, "clone")
                if standing(log, "clone", savepoint).standing is Standing.CUT:
                    assert left_in_the_middle(log.manifests()) == savepoint.uri
                    with pytest.raises(NotRestorableError, match="begin with the savepoint"):
                        specs_of("clone", {}, log.manifests(), allow_dropped_state=False)
                elif standing(log, "clone", savepoint).standing is Standing.BEGUN:
                    break
                continue
            done = attempt == calls
            break
        found = standing(log_of(store, "clone"), "clone", savepoint)
        assert found.standing is Standing.BEGUN
        assert not left_in_the_middle(log_of(store, "clone").manifests())
        assert restored(store, 4, "clone") == stand.folder.state[4]
        ids = {m.query_id for m in log_of(store, "clone").manifests()}
        assert ids == {found.query_id}
        report = verify(store, "clone")
        assert report.ok, report.findings
        if done:
            break
    assert calls > 8


def losing(inner: Any, calls: int) -> Any:
    """A store that does a write whose answer is lost, and nothing after it."""
    left = itertools.count(calls, -1)
    down: list[bool] = []

    def plan(verb: str, name: str, number: int) -> Any:
        if down:
            return "before"
        if verb in ("put", "create", "put_file") and next(left) <= 0:
            down.append(True)
            return "after"
        return None

    return FailingStore(inner, plan)


def test_a_job_with_a_log_of_its_own_is_refused() -> None:
    savepoint, source = Stand().run(2).save()
    other, _ = Stand().run(2).save()
    used = Folder(MemoryStore(new_id()))
    with pytest.raises(CheckpointLocationError, match="has a log already"):
        begun(used.store, source, JOB)
    store = MemoryStore(new_id())
    begun(store, source)
    assert begun(store, source), "the same one again: nothing is done"
    with pytest.raises(CheckpointLocationError, match=other.id):
        standing(log_of(store, "clone"), "clone", other)
    assert savepoint.id != other.id


def test_a_job_goes_on_after_its_first_records_are_gone() -> None:
    """What it began with is told by its claims, which are never deleted."""
    savepoint, source = Stand().run(3).save()
    store = MemoryStore(new_id())
    query_id = begun(store, source)
    log = log_of(store, "clone")
    claims = {m.sequence for m in log.manifests() if m.kind == "claim"}
    store.delete(record_name(s) for s in log.sequences() if s not in claims)
    again = standing(log_of(store, "clone"), "clone", savepoint)
    assert (again.standing, again.query_id) == (Standing.BEGUN, query_id)


def test_somebody_who_goes_on_from_a_beginning_that_was_cut_is_not_overrun() -> None:
    savepoint, source = Stand().run(3).save()
    store = MemoryStore(new_id())
    with pytest.raises(Cut):
        begun(cutting(store, 2), source)
    log_of(store, "clone").claim(query_id="another")
    with pytest.raises(CheckpointLocationError, match="has a log already"):
        standing(log_of(store, "clone"), "clone", savepoint)


@pytest.mark.parametrize("folder", ["log/", "data/", "base/"])
def test_a_damaged_savepoint_gives_no_job(folder: str) -> None:
    stand = Stand().run(2).run(2, base="files").run(2, own=True)
    _, source = stand.save()
    name = source.list(folder)[-1].name
    data = source.get(name)
    source.put(name, [data[: len(data) // 2] + b"?" + data[len(data) // 2 + 1 :]])
    store = MemoryStore(new_id())
    with pytest.raises(CorruptionError):
        begun(store, source)
    assert standing(log_of(store, "clone"), "clone", read_savepoint(source)).standing in (
        Standing.NEW,
        Standing.CUT,
    )


def test_the_driver_cleans_nothing_while_a_savepoint_is_made() -> None:
    store, location = MemoryStore(new_id()), Location()
    started = driver.Started(store, {"op": 1}, base_every_epochs=2, clean_every_epochs=1)
    cleaner = started.session.cleaner
    ran(started, location, 4)
    cleaner.drain(60)
    before = [info.name for info in store.list("log/")]
    with cleaner.held():
        ran(started, location, 4)
        cleaner.drain(60)
        assert set(before) <= {info.name for info in store.list("log/")}
    ran(started, location, 4)
    cleaner.drain(60)
    assert not set(before) <= {info.name for info in store.list("log/")}


def test_savepoints_lie_in_a_hidden_folder_also_in_s3() -> None:
    folder = default_folder("s3://bucket/state", "clicks", "0000000007-abc")
    assert parse_s3_uri(folder) == ("bucket", "state/.savepoints/clicks/0000000007-abc")
    assert parse_s3_uri("s3://bucket/.savepoints") == ("bucket", ".savepoints")
    for other in ("s3://bucket/.hidden", "s3://bucket/.savepoints/../x", "s3://bucket/a//b"):
        with pytest.raises(SettingError):
            parse_s3_uri(other)


def test_large_objects_go_through_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("recovery.savepoints.state_copy._IN_MEMORY_BYTES", 16)
    stand = Stand().run(2, own=True).run(2, base="files")
    target = LocalStore(tmp_path, new_id=new_id)
    savepoint = create_savepoint(stand.making(open_target=lambda _: target))
    assert verify(target, JOB).ok
    assert savepoint.objects == len(target.list("data/")) + len(target.list("base/"))
