"""Savepoints of jobs in this process, and jobs that begin with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recovery.savepoints.begin_with_savepoint import begin_job
from recovery.savepoints.create_savepoint import Making, create_savepoint
from recovery.savepoints.location_files import StoreLocation
from recovery.savepoints.savepoint import read_savepoint
from recovery.savepoints.state_at_epoch import saved_state
from snapshot.log.commit_log import CommitLog
from snapshot.storage.stores_by_uri import open_store
from statebackend import system
from tests.support.inprocess import InProcessJob

__all__ = ["begun", "location", "saved"]


def location(folder: Path, batches: int) -> Path:
    """A checkpoint location with so many batches committed, and one more planned."""
    head = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": 5, "conf": {}})
    for name in ("offsets", "commits", "sources/0"):
        (folder / name).mkdir(parents=True)
    (folder / "metadata").write_text(json.dumps({"id": "query"}))
    for batch in range(batches + 1):
        (folder / f"offsets/{batch}").write_text(f"v1\n{head}\n{json.dumps({'logOffset': batch})}")
        (folder / f"sources/0/{batch}").write_text('v1\n{"path":"file:///x"}')
    for batch in range(batches):
        (folder / f"commits/{batch}").write_text('v1\n{"nextBatchWatermarkMs":0}')
    return folder


def saved(folder: Path, job: InProcessJob, to: str = "saved") -> str:
    """A savepoint of a job whose folder is ``folder``; its URI."""
    store = open_store(f"file://{folder}/store", new_id=system.new_id)
    place = location(folder / f"location-{to}", job.epoch)
    uri = f"file://{folder}/{to}"
    create_savepoint(
        Making(
            store=store,
            job=job.name,
            location=StoreLocation(open_store(str(place), new_id=system.new_id)),
            manifests=CommitLog(store, job=job.name, writer="t", new_id=system.new_id).manifests,
            open_target=lambda _: open_store(uri, new_id=system.new_id),
            new_id=system.new_id,
            now_ms=lambda: 7,
            writer="t",
        )
    )
    return uri


def begun(savepoint: str, folder: Path, **settings: Any) -> InProcessJob:
    """A new job with a savepoint's state; not started."""
    source = open_store(savepoint, new_id=system.new_id)
    found = read_savepoint(source)
    theirs = CommitLog(source, job=found.job, writer="t", new_id=system.new_id)
    job = InProcessJob(folder, name="clone", **settings)
    target = open_store(f"file://{folder}/store", new_id=system.new_id)
    log = CommitLog(target, job="clone", writer="t", new_id=system.new_id)
    state = saved_state(source, found, theirs)
    begin_job(state, found, source, target, log, after=-1, query_id="query", new_id=system.new_id)
    return job
