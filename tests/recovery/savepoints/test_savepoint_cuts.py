"""Savepoints that are cut while they are made or begun with, and jobs that go on from one."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest

from recovery.inspect.job_list import BEGUN_NAME
from recovery.inspect.verify import verify
from recovery.savepoints.begin_with_savepoint import Standing, left_in_the_middle, standing
from recovery.savepoints.create_savepoint import create_savepoint
from recovery.savepoints.savepoint import read_savepoint
from recovery.savepoints.savepoint_folder import delete_savepoint
from snapshot.formats.record import record_name
from snapshot.storage.memory_store import MemoryStore
from statebackend.errors import (
    CheckpointLocationError,
    CorruptionError,
    NotRestorableError,
    StateBackendError,
)
from statebackend.runtime.driver.job_start import specs_of
from tests.cli.folder import JOB, Folder, new_id
from tests.recovery import driver
from tests.recovery.savepoints.saved_jobs import (
    Cut,
    Location,
    Stand,
    begun,
    cutting,
    log_of,
    ran,
    restored,
)
from tests.support.failing_store import FailingStore


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


@mock.patch("snapshot.retention.history_keeping.EPOCHS_AN_OBJECT", 1)
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
