"""What a job has besides its keys: operator state, and savepoints, on a disk that is recorded.

What Spark has committed, or a caller was told to be done, is a file of its own, which is synced.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Final

from recovery.inspect.verify import verify
from recovery.savepoints.create_savepoint import create_savepoint
from recovery.savepoints.savepoint import Savepoint, read_savepoint
from recovery.savepoints.savepoint_folder import delete_savepoint
from snapshot.storage.local_store import LocalStore
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import NotRestorableError
from tests.cli.folder import JOB
from tests.crash.disk import Image, write_image
from tests.crash.life import last_epoch, named
from tests.crash.recorder import Recorder
from tests.recovery.driver import Started, new_id
from tests.recovery.savepoints.saved_jobs import Stand, begun, restored
from tests.recovery.test_operator_state import SMALL, forget, run, workers

__all__ = [
    "check_operator_state",
    "check_savepoint_cut",
    "recorded_operator_state",
    "recorded_savepoint",
]

EPOCHS: Final = 4  # of each driver
SAVED: Final = 4  # the epoch of the savepoint


def _store(root: Path, name: str) -> LocalStore:
    return LocalStore(root / name, new_id=new_id)


def _done(root: Path, what: str) -> None:
    _store(root, "done").put(what, [b""])


def _is_done(root: Path) -> set[str]:
    return {info.name for info in _store(root, "done").list("")}


# --- lists and broadcast maps --------------------------------------------------------------------


def _started(root: Path, first_epoch: int) -> Started:
    forget()
    return Started(
        _store(root, "store"),
        {"op": 2},
        first_epoch=first_epoch,
        inline_budget_bytes=SMALL,
        clean_every_epochs=1,
    )


def _rules(epoch: int) -> list[tuple[int, int]]:
    """What an epoch puts: in every other one a content that had been there before."""
    return [(key, epoch % 2) for key in range(8)]


def recorded_operator_state(root: Path) -> tuple[Recorder, int]:
    """Two drivers of a job with a list and a broadcast map, in objects of their own."""
    recorder = Recorder(root, lambda kind, path: "operator state")
    with recorder:
        for first in (0, EPOCHS):
            started = _started(root, first)
            for epoch in range(first, first + EPOCHS):
                run(started, epoch, *_rules(epoch))
                _done(root, f"{epoch}")
    return recorder, 0


def check_operator_state(image: Image, root: Path, operations: int) -> None:
    """A new driver gives what the last committed epoch had, and goes on to clean."""
    write_image(image, root)
    committed = max(map(int, _is_done(root)), default=-1)
    store = _store(root, "store")
    named(store)
    assert last_epoch(store) >= committed, f"epoch {committed} is lost"
    started = _started(root, committed + 1)
    for epoch in (committed + 1, committed + 2):
        for worker in workers(started, epoch):
            assert worker.numbers() == [10 * worker.subtask + n for n in range(epoch)]
            assert worker.rules() == (dict(_rules(epoch - 1)) if epoch else {})
        run(started, epoch, *_rules(epoch))
        forget()  # else it gives what this process has
    named(store)


# --- savepoints ----------------------------------------------------------------------------------


def _stand(store: ObjectStore) -> Stand:
    return Stand(store).run(2).run(2, own=True).run(1, own=True, base="files")


def _save(root: Path, stand: Stand, folder: str) -> Savepoint:
    making: dict[str, Any] = {"open_target": lambda _: _store(root, folder)}
    return create_savepoint(stand.making(**making))


def recorded_savepoint(root: Path) -> tuple[Recorder, int]:
    """A job of which a savepoint is made, and another that begins with it."""
    recorder = Recorder(root, lambda kind, path: f"savepoint: {path.split('/')[0]}")
    with recorder:
        stand = _stand(_store(root, "job"))
        first = len(recorder.ops)
        _save(root, stand, "savepoint")
        _done(root, "saved")
        begun(_store(root, "clone"), _store(root, "savepoint"))
        _done(root, "begun")
    return recorder, first


def check_savepoint_cut(image: Image, root: Path, operations: int) -> None:
    """It is whole or none, whatever the cut; a job that was to begin with it begins once."""
    write_image(image, root)
    done, source, clone = _is_done(root), _store(root, "savepoint"), _store(root, "clone")
    truth = _stand(_store(root, "truth"))
    state = truth.folder.state[SAVED]
    assert restored(_store(root, "job"), SAVED) == state
    try:
        savepoint = read_savepoint(source)
    except NotRestorableError:
        assert not done
        assert not clone.list("")
        with contextlib.suppress(NotRestorableError):  # nothing of it is there
            delete_savepoint(source)
        assert not source.list("")
        assert _save(root, truth, "again").epoch == SAVED
        assert restored(_store(root, "again"), SAVED) == state
        return
    assert savepoint.epoch == SAVED
    assert restored(source, SAVED) == state
    assert verify(source, JOB).ok
    before = {info.name for info in clone.list("")} if "begun" in done else None
    query_id = begun(clone, source)
    assert before in (None, {info.name for info in clone.list("")})
    assert restored(clone, SAVED, "clone") == state
    assert verify(clone, "clone").ok
    assert begun(clone, source) == query_id
