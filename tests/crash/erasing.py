"""Erasing keys on a disk that is recorded: cut anywhere, and done again.

A job of a real processor, with every kind of state, and a savepoint of it that is written anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from recovery.inspect.verify import verify
from recovery.savepoints.location_files import StoreLocation
from recovery.savepoints.verify_savepoint import verify_savepoint
from snapshot.storage.local_store import LocalStore
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.stores_by_uri import open_store
from statebackend import system
from statebackend.system import SYSTEM
from statebackend.tables.erase_keys import EraseReport, erase_in_job
from statebackend.tables.read_state import read_state
from tests.crash.disk import Image, write_image
from tests.crash.recorder import Recorder
from tests.recovery.driver import new_id
from tests.recovery.savepoints.saved_jobs import Location
from tests.support.golden import Kept
from tests.support.inprocess import InProcessJob
from tests.tables.erased_jobs import ANN, JOB, holding, saved_below

__all__ = ["check_erasing", "recorded_erasing"]

_EPOCHS: Final = 3
_STATES: Final = ("all", "last_ttl")
_Rows = dict[str, list[object]]


def _location() -> StoreLocation:
    store = MemoryStore(new_id())
    place = Location(store)
    place.put("metadata", json.dumps({"id": "query"}))
    return place.batches(_EPOCHS).files()


def _erase(root: Path) -> EraseReport:
    uri = f"file://{root}"
    return erase_in_job(
        uri,
        JOB,
        open_store(f"{uri}/{JOB}", new_id=system.new_id),
        _location(),
        "op",
        [ANN],
        rewrite_savepoints=True,
        options=None,
        system=SYSTEM,
    )


def recorded_erasing(root: Path) -> tuple[Recorder, int]:
    """A job and its savepoint, of which keys are erased; ``done`` says that it came to the end."""
    recorder = Recorder(root, lambda kind, path: f"erase: {path.split('/')[0].lstrip('.')}")
    with recorder:
        made = InProcessJob(root.parent / "run", name=JOB, time_mode="processing", retain_epochs=2)
        made._uri = f"file://{root}/{JOB}"
        made.start(Kept(), parallelism=1)
        for epoch in range(_EPOCHS):
            made.run([(key, epoch) for key in (ANN, 1, 2)])
        saved_below(f"file://{root}", _location())
        first = len(recorder.ops)
        _erase(root)
        LocalStore(root / "done", new_id=new_id).put("erased", [b""])
    return recorder, first


def _rows(root: Path) -> tuple[_Rows, str]:
    """What the job holds of some states, and where its savepoint lies."""
    uri = f"file://{root}"
    (savepoint,) = (path for path in (root / ".savepoints" / JOB).iterdir() if path.is_dir())
    rows: _Rows = {}
    for name in _STATES:
        rows[name] = read_state(uri, JOB, "op", name).read_all().to_pylist()
        of = {"savepoint": f"file://{savepoint}"}
        rows[f"saved {name}"] = read_state("", None, "op", name, **of).read_all().to_pylist()
    return rows, f"file://{savepoint}"


def check_erasing(image: Image, root: Path, operations: int) -> None:
    """Job and savepoint are whole, each with the keys or without; doing it again leaves none."""
    write_image(image, root)
    job = LocalStore(root / JOB, new_id=new_id)
    done = any(LocalStore(root / "done", new_id=new_id).list(""))
    before, savepoint = _rows(root)
    for name, rows in before.items():
        keys = {row["key"]["k"] for row in rows}  # type: ignore[index]
        assert keys in ({ANN, 1, 2}, {1, 2}), f"{name}: {keys}"
        assert not done or keys == {1, 2}, f"{name} has what was erased"
    saved = open_store(savepoint, new_id=system.new_id)
    assert verify(job, JOB).ok
    _erase(root)
    after, _ = _rows(root)
    others = {name: [r for r in rows if r["key"]["k"] != ANN] for name, rows in before.items()}  # type: ignore[index]
    assert after == others
    assert not holding(job)
    assert not holding(saved)
    assert verify_savepoint(saved).ok
