"""Lists savepoints: those of one job or of all, finished or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec

from recovery.inspect.job_list import BEGUN_NAME, SAVEPOINT_NAME
from recovery.savepoints.savepoint import decode_begun, read_savepoint
from snapshot.storage.object_store import ObjectInfo, ObjectStore
from statebackend.errors import NotRestorableError, ObjectNotFoundError, StateBackendError

__all__ = ["SavepointInfo", "list_savepoints"]


class SavepointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One savepoint in a list.

    Attributes:
        complete: whether it exists; what is left of one that was never finished does not.
        id: names it.
        uri: where it lies.
        job: that it was taken from; empty if it is of none, or that is not known.
        epoch: after which it is; None if not known.
        created_ms: when it was made; None if not known.
        objects: in its folder.
        size_bytes: of all of them.
        problem: why `savepoint.json` does not read; empty if it does.
    """

    id: str
    uri: str
    job: str
    complete: bool
    epoch: int | None
    created_ms: int | None
    objects: int
    size_bytes: int
    problem: str = ""


def list_savepoints(
    store: ObjectStore, open_at: Callable[[str], ObjectStore], *, job: str | None = None
) -> list[SavepointInfo]:
    """Every savepoint below a folder, the newest last; those that were never finished too.

    Args:
        store: the folder. open_at: gives the store of a folder below it.
        job: those of one job alone.
    """
    folders: dict[str, list[ObjectInfo]] = {}
    listing = store.list("")
    for info in listing:
        folder, slash, name = info.name.rpartition("/")
        if name in (SAVEPOINT_NAME, BEGUN_NAME):
            folders.setdefault(f"{folder}{slash}", [])
    for info in listing:
        for depth in _prefixes(info.name):
            if depth in folders:
                folders[depth].append(info)
                break
    infos = (_info(open_at(one.rstrip("/")), inside) for one, inside in folders.items())
    chosen = [one for one in infos if one is not None and (job is None or one.job == job)]
    return sorted(chosen, key=lambda one: (one.job, one.created_ms or 0, one.id))


def _prefixes(name: str) -> Iterable[str]:
    """Every folder that an object is in, the nearest first; the root last."""
    while "/" in name:
        name = name.rpartition("/")[0]
        yield f"{name}/"
    yield ""


def _info(store: ObjectStore, inside: list[ObjectInfo]) -> SavepointInfo | None:
    """None of a mark of deletion alone, which landed late."""
    size_bytes, problem = sum(info.size_bytes for info in inside), ""
    names = {info.name.rpartition("/")[2] for info in inside}
    complete = {SAVEPOINT_NAME, BEGUN_NAME} <= names
    try:
        if complete:
            one = read_savepoint(store)
            return SavepointInfo(
                id=one.id,
                uri=store.uri,
                job=one.of_job,
                complete=True,
                epoch=one.epoch,
                created_ms=one.created_ms,
                objects=len(inside),
                size_bytes=size_bytes,
            )
    except NotRestorableError:
        complete = False
    except StateBackendError as error:
        problem = error.what
    begun = None
    with suppress(ObjectNotFoundError):
        begun = decode_begun(store.get(BEGUN_NAME))
    if begun is not None and begun.deleted and len(inside) == 1:
        return None
    return SavepointInfo(
        id=begun.id if begun else store.uri.rpartition("/")[2],
        uri=store.uri,
        job=begun.job if begun and begun.job != begun.id else "",
        complete=complete,
        epoch=None,
        created_ms=begun.created_ms if begun else None,
        objects=len(inside),
        size_bytes=size_bytes,
        problem=problem,
    )
