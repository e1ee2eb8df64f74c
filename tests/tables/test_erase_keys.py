"""An erased key is nowhere: checked on the bytes of everything that is left."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import statebackend
from recovery.inspect.verify import verify
from recovery.savepoints.savepoint import read_savepoint
from recovery.savepoints.savepoint_folder import delete_savepoint
from recovery.savepoints.state_at_epoch import last_epochs
from recovery.savepoints.verify_savepoint import verify_savepoint
from snapshot.log.commit_log import CommitLog
from snapshot.storage.object_store import ObjectStore
from snapshot.storage.stores_by_uri import open_store
from statebackend import system
from statebackend.cli.job_commands import app
from statebackend.errors import SettingError, UsageError
from statebackend.system import SYSTEM
from statebackend.tables.erase_from_log import Erasing
from statebackend.tables.erase_keys import erase_in_job, erase_keys
from statebackend.tables.stored_job import job_in
from statebackend.tables.wanted_keys import encoded_keys
from tests.recovery.savepoints.saved_jobs import Cut, cutting
from tests.tables.erased_jobs import (
    ANN,
    JOB,
    OTHERS,
    PATTERN,
    STATES,
    Going,
    holding,
    of_others,
    saved,
)


@pytest.mark.promise
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.full),
        pytest.param({"base_every_epochs": 1}, marks=pytest.mark.full),
        {"inline_limit_bytes": 0},
    ],
    ids=str,
)
def test_no_object_holds_an_erased_key(tmp_path: Path, settings: dict[str, Any]) -> None:
    going = Going(tmp_path, **settings)
    before = going.rows()
    assert len(holding(going.store)) > 2
    report = going.erase()
    assert not holding(going.store)
    assert going.rows() == of_others(before)
    assert report.epoch == 3
    assert set(report.entries) == {*STATES, "timers"}
    assert len(report.dropped_epochs) >= 2
    assert verify(going.store, JOB).ok
    assert any("local_dir" in sentence for sentence in report.still)


@pytest.mark.parametrize("parallelism", [2, pytest.param(3, marks=pytest.mark.full)])
def test_the_job_goes_on_without_the_key_and_its_local_copies(
    tmp_path: Path, parallelism: int
) -> None:
    going = Going(tmp_path)
    before = of_others(going.rows())
    going.erase()
    going.start(parallelism)
    going.run(ANN)
    lists = [one for one in going.rows()["all"] if one["key"]["k"] == ANN]
    assert [one["value"]["v"] for one in lists] == [4]  # nothing of before
    after = of_others(going.rows())
    assert sorted(map(str, after["all"])) == sorted(map(str, before["all"]))


def test_local_copies_are_gone_once_the_job_runs_again(tmp_path: Path) -> None:
    going = Going(tmp_path)
    local = tmp_path / "run" / "local"

    def held() -> list[Path]:
        return [p for p in local.rglob("*") if p.is_file() and PATTERN in p.read_bytes()]

    assert held()
    going.erase()
    going.start()
    for _ in range(3):
        going.run(*OTHERS)
    assert not held()


@pytest.mark.full  # every request of erasing, cut
def test_what_is_cut_anywhere_goes_on_and_is_repeated(tmp_path: Path) -> None:
    made = Going(tmp_path / "made", inline_limit_bytes=0)
    before = made.rows()
    for calls in itertools.count():
        folder = tmp_path / str(calls)
        shutil.copytree(made.folder / JOB, folder / JOB)
        store = open_store(f"file://{folder}/{JOB}", new_id=system.new_id)
        verbs = ("put", "create", "put_file", "delete")
        try:
            erase_in_job(
                f"file://{folder}",
                JOB,
                cutting(store, calls, verbs),
                made.location.files(),
                "op",
                [ANN],
                rewrite_savepoints=False,
                options=None,
                system=SYSTEM,
            )
        except Cut:
            made_there = Going.__new__(Going)
            made_there.folder = folder
            assert made_there.rows() in (before, of_others(before))
            assert verify(store, JOB).ok
            place = f"{made.uri}/location"
            erase_keys(f"file://{folder}", JOB, "op", [ANN], checkpoint_location=place)
            assert not holding(store)
            assert made_there.rows() == of_others(before)
        else:
            break
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    assert calls >= 5


def test_savepoints_that_hold_the_key_are_listed_and_rewritten_on_request(tmp_path: Path) -> None:
    going = Going(tmp_path)
    savepoint = saved(going)
    store = open_store(savepoint.uri, new_id=system.new_id)
    before = going.rows(savepoint=savepoint.uri)
    report = going.erase()
    (held,) = report.savepoints
    assert (held.uri, held.rewritten) == (savepoint.uri, False)
    assert set(held.entries) == {*STATES, "timers"}
    assert any(savepoint.uri in sentence for sentence in report.still)
    assert holding(store)
    place = f"{going.uri}/location"
    keys = iter([ANN])
    report = erase_keys(
        going.uri, JOB, "op", keys, checkpoint_location=place, rewrite_savepoints=True
    )
    assert report.savepoints[0].rewritten
    assert not any(savepoint.uri in sentence for sentence in report.still)
    assert not holding(store)
    assert going.rows(savepoint=savepoint.uri) == of_others(before)
    assert verify_savepoint(store).ok
    assert read_savepoint(store).id == savepoint.id
    assert not going.erase().savepoints
    assert not delete_savepoint(store)  # nothing else lies in its folder
    assert not store.list("")


@pytest.mark.full  # every request of erasing, cut
def test_of_several_operators_each_is_whole_wherever_it_is_cut(tmp_path: Path) -> None:
    rows = pa.table({"k": [ANN, 1, 2], "n": [10, 11, 12]})
    one = statebackend.OperatorState("k bigint", {"s": rows})

    def read(uri: str, uid: str) -> dict[int, int]:
        found = statebackend.read_state(None, None, uid, "s", savepoint=uri).read_all().to_pylist()
        return {row["key"]["k"]: row["value"]["n"] for row in found}

    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for calls in itertools.count():
        uri = f"file://{tmp_path}/{calls}"
        statebackend.write_savepoint(uri, {"a": one, "b": one}, parallelism=2)
        store = open_store(uri, new_id=system.new_id)
        done = erased_in(store, cutting(store, calls), "b", scratch)
        assert read(uri, "a") == {ANN: 10, 1: 11, 2: 12}
        assert erased_in(store, store, "b", scratch)
        assert read(uri, "a") == {ANN: 10, 1: 11, 2: 12}
        assert read(uri, "b") == {1: 11, 2: 12}
        if done:
            break
    assert calls >= 7


def erased_in(plain: ObjectStore, store: ObjectStore, uid: str, scratch: Path) -> bool:
    """Whether it was not cut; both operators are at their epoch in any case."""
    job = read_savepoint(plain).job
    log = CommitLog(store, job=job, writer="test", new_id=system.new_id)
    try:
        manifests = log.manifests()
        found = job_in(store, job, manifests, 0)
        keys = encoded_keys([ANN], found.operator(uid).key_schema, 1024)
        given = {"store": store, "job": job, "log": log, "manifests": manifests}
        Erasing(**given, epoch=0, scratch=scratch).run(uid, keys)
    except Cut:
        return False
    finally:
        left = CommitLog(plain, job=job, writer="test", new_id=system.new_id).manifests()
        assert last_epochs(left) == {"a": 0, "b": 0}
    return True


def test_a_dry_run_counts_and_changes_nothing(tmp_path: Path) -> None:
    going = Going(tmp_path)
    names = [info.name for info in going.store.list("")]
    report = going.erase(dry_run=True)
    assert set(report.entries) == {*STATES, "timers"}
    assert names == [info.name for info in going.store.list("")]


def test_a_wrong_request_changes_nothing(tmp_path: Path) -> None:
    going = Going(tmp_path)
    names = [info.name for info in going.store.list("")]
    place = f"{going.uri}/location"
    with pytest.raises(SettingError, match="checkpoint"):
        erase_keys(going.uri, JOB, "op", [ANN])
    with pytest.raises(SettingError, match="no operator 'other'"):
        erase_keys(going.uri, JOB, "other", [ANN], checkpoint_location=place)
    with pytest.raises(UsageError, match="key column 'k'"):
        erase_keys(going.uri, JOB, "op", ["ann"], checkpoint_location=place)
    going.location.put("metadata", json.dumps({"id": "another"}))
    with pytest.raises(SettingError, match="not the checkpoint location"):
        going.erase()
    assert names == [info.name for info in going.store.list("")]


def test_the_command_line_erases_only_when_it_is_told_so(tmp_path: Path) -> None:
    going = Going(tmp_path)
    place = (going.uri, str(ANN), "--job", JOB, "--operator", "op")
    located = (*place, "--checkpoint-location", str(tmp_path / "location"))

    def run(*args: str, status: int = 0) -> str:
        done = CliRunner().invoke(app, ["state", "erase", *args])
        assert done.exit_code == status, done.output
        return done.output

    assert "--checkpoint-location" in run(*place, "--yes", status=2)
    assert "nothing was erased" in run(*located)
    assert holding(going.store)
    assert "local_dir" in run(*located, "--yes")
    assert not holding(going.store)
    report = json.loads(run(*located, "--yes", "--json"))["report"]
    assert (report["entries"], report["dropped_epochs"]) == ({}, [])
