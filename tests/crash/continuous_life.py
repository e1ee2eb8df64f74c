"""A continuous job's life: started, checkpointed, killed, started again, stopped with a savepoint.

At last another job begins with the savepoint, at another parallelism, and reads the rest. What a
caller was told is a file of its own, which is synced. After each cut of the recording somebody
starts what he would start then, and what comes out must be the truth, each row once.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from recovery.inspect.verify import verify
from recovery.savepoints.savepoint import read_savepoint
from recovery.savepoints.savepoint_folder import delete_savepoint, is_probe
from recovery.savepoints.state_at_epoch import last_epochs
from recovery.savepoints.verify_savepoint import verify_savepoint
from snapshot.storage.local_store import LocalStore
from statebackend.continuous.driver.continuous_query import ContinuousQuery
from statebackend.errors import NotRestorableError
from statebackend.keygroups import key_group_range
from tests.crash.continuous_job import (
    GROUPS,
    LONG_S,
    SAVED,
    STORES,
    Let,
    begun,
    store_of,
    values_of,
    visible,
    wrong_output,
)
from tests.crash.cuts import Tried, try_cuts
from tests.crash.disk import Image, Op, write_image
from tests.crash.life import check_copies, check_store, named
from tests.crash.recorder import Recorder
from tests.recovery.driver import manifests_of, new_id

__all__ = ["ContinuousKind", "ContinuousLife", "lived_continuous", "try_continuous"]

TOLD, BEGAN, ENDED = "told", "saved", "ended"  # what callers were told
SINGLES: Final = 2  # most of what is pending is of local copies
JOB, CLONE = "job", "clone"


@dataclass(frozen=True)
class ContinuousKind:
    """Which life: ``files``: bases are RocksDB's own files."""

    files: bool = False


@dataclass
class ContinuousLife:
    """What was recorded."""

    ops: list[Op]
    kind: ContinuousKind


def step_of(kind: str, path: str) -> str:
    """The step of the protocol that an operation on a path belongs to."""
    top, _, rest = path.partition("/")
    if top == "out":
        return "staged output" if rest.startswith("_") else "output"
    if top == "store":
        return {"saved": "savepoint", CLONE: "clone"}.get(rest.partition("/")[0], "job")
    return {"local": "local copies"}.get(top, "what callers know")


class _Living:
    """Goes through the life."""

    def __init__(self, root: Path, life: ContinuousLife) -> None:
        self.root, self.life = root, life

    @contextlib.contextmanager
    def started(
        self, name: str, let: Let, parallelism: int, savepoint: str | None = None
    ) -> Iterator[ContinuousQuery]:
        files = self.life.kind.files
        with begun(
            self.root, name, let, files=files, parallelism=parallelism, savepoint=savepoint
        ) as query:
            yield query

    def go(self) -> None:
        let = Let(0)
        with self.started(JOB, let, 2) as query:
            self.checkpointed(query, let, 2)
            self.checkpointed(query, let, 4)
            let.on(5)  # what it was at when it was killed
        let = Let(4)
        with self.started(JOB, let, 2) as query:
            self.checkpointed(query, let, 6)
            let.on(8)
            assert not query.stop_with_savepoint(SAVED).uncommitted
            self.told(TOLD, query.epoch)
        self.told(BEGAN)
        with self.started(CLONE, Let(), 1, SAVED) as query:
            assert query.await_termination(LONG_S)
        self.told(ENDED)

    def checkpointed(self, query: ContinuousQuery, let: Let, rows: int) -> None:
        let.on(rows)
        assert query.checkpoint() is not None
        self.told(TOLD, query.epoch)

    def told(self, what: str, epoch: int | None = None) -> None:
        said = {"epoch": epoch, "values": sorted(values_of(visible(self.root)))}
        store = LocalStore(self.root / "done", new_id=new_id)
        name = what if epoch is None else f"{what}-{epoch}"
        store.put(name, [json.dumps(said).encode()])


def lived_continuous(root: Path, kind: ContinuousKind) -> ContinuousLife:
    """The life, recorded."""
    root.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(root, step_of)
    life = ContinuousLife(recorder.ops, kind)
    with recorder:
        _Living(root, life).go()
    return life


def try_continuous(life: ContinuousLife, root: Path, share: tuple[int, int] = (0, 1)) -> Tried:
    """Cut everywhere and start again, as `try_cuts`."""
    check = partial(check_continuous, kind=life.kind)
    # A file of the store that never got its name is found by nobody, until it is swept.
    return try_cuts(life.ops, check, root, share=share, singles=SINGLES, alike=_is_temporary)


def _is_temporary(path: str) -> bool:
    return "/.tmp/" in path


# --- after a cut ----------------------------------------------------------------------------------


def check_continuous(image: Image, root: Path, operations: int, kind: ContinuousKind) -> None:
    """Start on what a disk held what would be started then, and check what comes of it.

    Raises:
        AssertionError: something that somebody was told is lost or wrong, or left for ever.
    """
    write_image(image, root)
    told = _told(root)
    _check_as_it_lies(root, told)
    name, savepoint = (CLONE, SAVED) if BEGAN in told else (JOB, None)
    parallelism = 1 + operations % 3
    # A second one has nothing to do.
    for again in (False, True) if operations % 3 == 0 else (False,):
        with begun(
            root, name, Let(), files=kind.files, parallelism=parallelism, savepoint=savepoint
        ) as query:
            assert query.await_termination(LONG_S)
            if not again and not _has_savepoint(root):
                query.savepoint(SAVED)
                _check_savepoint(root)
        wrong = wrong_output(visible(root), whole=True)
        assert not wrong, wrong
    store = store_of(root, name)
    named(store, name)
    saved = manifests_of(store_of(root, "saved"), JOB) if name == CLONE else []
    epochs = [m.epoch for m in saved if m.kind == "checkpoint"]
    check_store(store, name, begun_with=min(epochs, default=0))
    assert verify(store, name).ok
    left = [path.name for path in (root / STORES / name / ".tmp").iterdir()]
    assert not left, f"left in .tmp: {left}"
    staged = root / "out" / "_statebackend" / name / "sink"
    assert not [*staged.glob("*/*")], "staged files are left"
    for subtask in range(parallelism):
        of = key_group_range(subtask, parallelism, GROUPS)
        check_copies(root / "local" / name / "op" / f"{of.start}-{of.end}")


def _told(root: Path) -> dict[str, dict[str, object]]:
    store = LocalStore(root / "done", new_id=new_id)
    return {info.name: json.loads(store.get(info.name)) for info in store.list("")}


def _check_as_it_lies(root: Path, told: dict[str, dict[str, object]]) -> None:
    """What readers see is no row twice, and all that was told to be there; the log names nothing
    that is gone; a savepoint is whole, or none."""
    rows = visible(root)
    wrong = wrong_output(rows, whole=ENDED in told)
    assert not wrong, wrong
    for name, said in told.items():
        assert values_of(rows) >= set(said["values"]), f"output is lost that {name} was told of"
    for job in (JOB, CLONE):
        named(store_of(root, job), job)
    epochs = [said["epoch"] for name, said in told.items() if name.startswith(TOLD)]
    if epochs:
        last = min(last_epochs(manifests_of(store_of(root, JOB), JOB)).values(), default=-1)
        assert last >= max(epochs), f"epoch {max(epochs)} is lost: {last}"
    if _has_savepoint(root):
        _check_savepoint(root)
    else:
        assert BEGAN not in told
        saved = store_of(root, "saved")
        with contextlib.suppress(NotRestorableError):  # nothing of it is there
            delete_savepoint(saved)
        assert all(is_probe(info.name) for info in saved.list(""))


def _has_savepoint(root: Path) -> bool:
    try:
        read_savepoint(store_of(root, "saved"))
    except NotRestorableError:
        return False
    return True


def _check_savepoint(root: Path) -> None:
    report = verify_savepoint(store_of(root, "saved"))
    assert report.ok, report.findings
