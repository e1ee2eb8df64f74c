"""Savepoints that are refused, listed and deleted, and the folders that they lie in."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from recovery.inspect.job_list import SAVEPOINT_NAME, split_jobs
from recovery.savepoints.create_savepoint import create_savepoint
from recovery.savepoints.savepoint import below, default_folder, read_savepoint, savepoints_folder
from recovery.savepoints.savepoint_folder import delete_savepoint
from recovery.savepoints.savepoint_list import list_savepoints
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.stores_by_uri import open_store
from snapshot.storage.uris import parse_s3_uri
from statebackend.errors import (
    CheckpointLocationError,
    CorruptionError,
    NotRestorableError,
    SettingError,
    StoreUnreachableError,
    UnsupportedFormatError,
    UnsupportedQueryError,
)
from statebackend.runtime.driver.job_savepoints import OpenSavepoint
from tests.cli.folder import JOB, new_id
from tests.recovery.savepoints.saved_jobs import Stand, restored
from tests.support.failing_store import FailingStore

# --- what is said of them ------------------------------------------------------------------------


def test_the_log_says_what_a_job_begins_with(caplog: pytest.LogCaptureFixture) -> None:
    made, _ = Stand().run(2).save()
    own = structs.replace(made, job=made.id, job_uri="", location="/spark/checkpoint")
    begun = "job clone begins with the savepoint"
    for savepoint, said in (
        (made, f"{begun} {made.id} of job {JOB!r}, after"),
        (own, f"{begun} {made.id} of the query at /spark/checkpoint, after"),
        (structs.replace(own, query_id=""), f"{begun} {made.id}, after"),
    ):
        caplog.clear()
        job: Any = SimpleNamespace(name="clone")
        OpenSavepoint(job, MemoryStore("saved"), savepoint).log_begun("query")
        assert caplog.messages[0].startswith(said)


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
    assert not stand.targets


def test_a_location_of_another_query_is_refused_wherever_it_stands() -> None:
    stand = Stand().run(2)
    stand.location.put("metadata", '{"id": "another"}')
    with pytest.raises(SettingError, match="is not the checkpoint location of job"):
        stand.save()
    assert not stand.targets


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


def test_a_folder_with_something_else_in_it_is_refused_and_stays_as_it_is() -> None:
    stand, target = Stand().run(2), MemoryStore()
    target.put("notes.txt", [b"mine"])
    with pytest.raises(SettingError, match="lies there already"):
        stand.save(open_target=lambda _: target)
    assert [one.name for one in target.list("")] == ["notes.txt"]


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


def test_savepoints_lie_in_a_hidden_folder_also_in_s3() -> None:
    folder = default_folder("s3://bucket/state", "clicks", "0000000007-abc")
    assert parse_s3_uri(folder) == ("bucket", "state/.savepoints/clicks/0000000007-abc")
    assert parse_s3_uri("s3://bucket/.savepoints") == ("bucket", ".savepoints")
    for other in ("s3://bucket/.hidden", "s3://bucket/.savepoints/../x", "s3://bucket/a//b"):
        with pytest.raises(SettingError):
            parse_s3_uri(other)
