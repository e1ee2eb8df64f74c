"""Tasks that write a savepoint are killed, or their driver: what comes out is whole, or nothing."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import statebackend
from recovery.savepoints.savepoint_folder import delete_savepoint
from recovery.savepoints.verify_savepoint import verify_savepoint
from snapshot.storage.stores_by_uri import open_store
from statebackend import OperatorState
from statebackend.errors import NotRestorableError
from statebackend.system import SYSTEM
from statebackend.tables.stored_job import find_job
from tests.spark.cluster.trial import Trial, until

# Two starts of a cluster: a driver that was killed says nothing of executors that were.
# One to three minutes each: every driver starts executors of its own.
pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(1800)]

ROWS, KEYS, PARALLELISM = 2_000, 300, 12
PROGRAM = Path(__file__).with_name("savepoint_job.py")


def begin(trial: Trial, name: str) -> tuple[str, Path]:
    """Start a driver, and wait until its tasks have written something."""
    to = trial.root / name
    told = {"rows": ROWS, "keys": KEYS, "parallelism": PARALLELISM, "to": to.as_uri()}
    driver = trial.start(name, program=PROGRAM, **told)
    until(lambda: driver.poll() is not None or list(to.rglob("data/*/*/*")), "a slice")
    assert driver.poll() is None, trial.log_tail()
    return to.as_uri(), to


def slices(uri: str) -> list[tuple[int, int, str]]:
    (manifest,) = [one for one in find_job("", None, savepoint=uri).manifests if one.slices]
    return [(one.subtask, one.rows, one.digest) for one in manifest.slices]


def test_a_killed_executor_changes_nothing_and_a_killed_driver_leaves_no_savepoint(
    local_cluster: Trial,
) -> None:
    uri, folder = begin(local_cluster, "struck")
    local_cluster.processes.kill(local_cluster.processes.executors()[:1])
    local_cluster.finish(local_cluster.drivers[-1], "struck")
    numbers = range(ROWS)
    rows = pa.table(
        {"user": [f"u{n % KEYS}" for n in numbers], "index": [0] * ROWS, "n": pa.array(numbers)}
    )
    one = OperatorState("user string", {"all": rows, "last": rows.drop_columns("index")})
    plain = (local_cluster.root / "plain").as_uri()
    statebackend.write_savepoint(plain, {"op": one}, parallelism=PARALLELISM, max_parallelism=128)
    assert slices(uri) == slices(plain)
    store = open_store(uri, new_id=SYSTEM.new_id)
    assert verify_savepoint(store).ok
    assert len(list(folder.rglob("data/*/*/*"))) == PARALLELISM, "lost attempts left nothing"

    uri, folder = begin(local_cluster, "cut")
    local_cluster.drivers[-1].kill()
    local_cluster.drivers[-1].wait()
    with pytest.raises(NotRestorableError, match="never finished"):
        statebackend.states("", savepoint=uri)
    until(lambda: not local_cluster.processes.executors(), "the executors to end")
    delete_savepoint(open_store(uri, new_id=SYSTEM.new_id))
    assert not [path for path in folder.rglob("*") if path.is_file()]
