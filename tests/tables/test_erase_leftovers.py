"""What may hold an erased key yet: local files, late uploads, what the report says of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from recovery.inspect.job_list import BEGUN_NAME
from recovery.savepoints.savepoint import Begun, default_folder
from snapshot.formats.object_names import base_file_name, data_name
from snapshot.log.commit_log import CommitLog
from snapshot.retention.garbage_collection import ALL_PREFIXES, clean, outside_view
from snapshot.storage.stores_by_uri import open_store
from statebackend import system
from statebackend.errors import JobRunningError
from statebackend.system import SYSTEM
from statebackend.tables.erase_keys import erase_in_job
from tests.support.failing_store import FailingStore
from tests.tables.erased_jobs import ANN, JOB, OTHERS, PATTERN, Going, holding, of_others


def test_no_local_copy_of_the_operator_is_taken_over(tmp_path: Path) -> None:
    """Another subtask may have it in its files: what a rescale cut off stays for a while."""
    going = Going(tmp_path, epochs=2)

    def directories() -> set[str]:
        local = tmp_path / "run" / "local"
        return {path.read_text() for path in local.rglob("current")}

    before = directories()
    assert len(before) == 2
    going.erase()
    going.start()
    going.run(*OTHERS)
    assert not before & directories()


def test_what_was_deleted_before_is_not_taken_over_with_local_files(tmp_path: Path) -> None:
    """No entry of the key is in the newest epoch, but RocksDB's files hold its bytes yet."""
    going = Going(tmp_path, epochs=2)
    assert set(going.erase().entries) == {*going.rows()}
    going.start()
    going.run(*OTHERS)
    assert not going.erase().entries
    chains = [one.chain for m in log_of(going).manifests() for one in m.slices]
    assert not going.erase().entries
    assert not set(chains) & {one.chain for m in log_of(going).manifests() for one in m.slices}


def log_of(going: Going) -> CommitLog:
    return CommitLog(going.store, job=JOB, writer="test", new_id=system.new_id)


@pytest.mark.parametrize("again", ["erase", "gc"])
def test_an_upload_that_arrives_late_is_removed_by_the_next_look(
    tmp_path: Path, again: str
) -> None:
    """A store cannot refuse what a worker sent before the erasing began."""
    going = Going(tmp_path, epochs=2)
    generation = log_of(going).manifests()[-1].generation
    report = going.erase()
    (said,) = (one for one in report.still if "uploading" in one)
    assert "gc" in said
    late = [base_file_name(generation, "grant", "7.sst"), data_name(generation, 1, "late")]
    for name in late:
        going.store.put(name, [PATTERN])
    if again == "erase":
        going.erase()
    else:
        store = going.store
        clean(store, lambda: outside_view(store, log_of(going)), prefixes=ALL_PREFIXES)
    assert not holding_names(going, late)
    going.start()
    going.run(*OTHERS)


def holding_names(going: Going, names: list[str]) -> set[str]:
    return {info.name for info in going.store.list("")} & set(names)


def test_the_report_names_what_nobody_looked_into(tmp_path: Path) -> None:
    going = Going(tmp_path, epochs=3)
    going.store.put("base/notes.txt", [b"not ours"])
    going.store.put("log/00000000000000000000.ckpt", [b"damaged"])
    place = default_folder(going.uri, JOB, "cut")
    begun = Begun(id="cut", job=JOB, job_uri="", created_ms=1)
    open_store(place, new_id=system.new_id).put(BEGUN_NAME, [msgspec.json.encode(begun)])
    still = "\n".join(going.erase().still)
    assert "base/notes.txt" in still
    assert "00000000000000000000.ckpt: it does not read" in still
    assert f"{place}: not known (it was not finished" in still
    assert "of other jobs" in still


def test_a_query_that_runs_elsewhere_is_found_out_before_anything_is_changed(
    tmp_path: Path,
) -> None:
    """Its last batch was durable, so it could commit it although it was fenced meanwhile."""
    going = Going(tmp_path, epochs=3)
    before, names = going.rows(), {info.name for info in going.store.list("data/")}

    def plan(verb: str, name: str, number: int) -> Any:
        if verb == "put_file":
            going.location.put("commits/3", 'v1\n{"nextBatchWatermarkMs":0}')
        return None

    with pytest.raises(JobRunningError, match="committed batch 3"):
        erase_in_job(
            going.uri,
            JOB,
            FailingStore(going.store, plan),
            going.location.files(),
            "op",
            [ANN],
            rewrite_savepoints=False,
            options=None,
            system=SYSTEM,
        )
    assert going.rows() == before
    assert names <= {info.name for info in going.store.list("data/")}
    going.location.batches(1)
    going.start()
    going.run(*OTHERS)
    assert of_others(going.rows())
    assert holding(going.store)
