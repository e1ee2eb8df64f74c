"""What a savepoint holds: the state of its epoch, and what its sources had read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from recovery.inspect.describe import describe
from recovery.inspect.verify import verify
from recovery.savepoints.create_savepoint import create_savepoint
from recovery.savepoints.savepoint import read_savepoint
from snapshot.protocol.lineage import resolve
from snapshot.storage.local_store import LocalStore
from snapshot.storage.memory_store import MemoryStore
from statebackend.errors import NotRestorableError
from tests.cli.folder import JOB, OPERATOR, Folder, new_id
from tests.recovery import driver
from tests.recovery.savepoints.saved_jobs import (
    FILE_ENTRY,
    QUERY,
    Location,
    Stand,
    begun,
    log_of,
    ran,
    restored,
    saved,
)

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


def test_large_objects_go_through_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("recovery.savepoints.state_copy._IN_MEMORY_BYTES", 16)
    stand = Stand().run(2, own=True).run(2, base="files")
    target = LocalStore(tmp_path, new_id=new_id)
    savepoint = create_savepoint(stand.making(open_target=lambda _: target))
    assert verify(target, JOB).ok
    assert savepoint.objects == len(target.list("data/")) + len(target.list("base/"))


# --- file sources --------------------------------------------------------------------------------


def test_a_file_sources_log_goes_along_up_to_its_offset() -> None:
    stand = Stand().run(25)
    stand.location.compact(19)
    stand.location.store.delete([f"sources/0/{n}" for n in range(20)])
    stand.location.put("sources/0/25", "v1\n" + FILE_ENTRY % (25, 25))  # read, not yet planned
    savepoint, target = stand.save()
    logs = [file.name for file in savepoint.spark if file.name.startswith("sources/")]
    assert logs == ["sources/0/19.compact", *(f"sources/0/{n}" for n in range(20, 25))]
    assert target.get("spark/sources/0/24") == stand.location.store.get("sources/0/24")


def test_a_file_sources_log_keeps_its_interval() -> None:
    """Spark takes it from the last two compact files."""
    stand = Stand().run(75)
    for batch in (19, 39, 59):
        stand.location.compact(batch)
    savepoint, _ = stand.save()
    logs = [file.name for file in savepoint.spark if file.name.startswith("sources/")]
    assert logs == [
        "sources/0/39.compact",
        "sources/0/59.compact",
        *(f"sources/0/{n}" for n in range(60, 75)),
    ]


def test_a_file_sources_log_with_a_gap_is_refused() -> None:
    stand = Stand().run(3)
    stand.location.store.delete(["sources/0/1"])
    with pytest.raises(NotRestorableError, match="no entry 1"):
        stand.save()


def test_a_source_that_is_read_in_two_places_does_not_move_the_next_ones_log() -> None:
    """Spark's plan has its offset twice, and there is one folder of it."""
    stand = Stand().run(2)
    head = json.dumps({"batchWatermarkMs": 0})
    first, second = '{"logOffset":1}', '{"logOffset":3}'
    stand.location.put("offsets/1", f"v1\n{head}\n{first}\n{first}\n{second}")
    for number in range(4):
        stand.location.put(f"sources/1/{number}", "v1\n" + FILE_ENTRY % (number, number))
    savepoint, _ = stand.save()
    logs = [file.name for file in savepoint.spark if file.name.startswith("sources/")]
    assert logs == ["sources/0/0", "sources/0/1", *(f"sources/1/{n}" for n in range(4))]
    stand.location.store.delete(["sources/1/2"])
    with pytest.raises(NotRestorableError, match="sources/1 has no entry 2"):
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
