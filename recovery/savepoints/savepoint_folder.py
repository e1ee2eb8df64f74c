"""The folder of a savepoint: taken, still ours at the end or left again, and deleted."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import msgspec

from recovery.inspect.job_list import BEGUN_NAME, SAVEPOINT_NAME
from recovery.savepoints.savepoint import (
    SPARK_FOLDER,
    Begun,
    Savepoint,
    decode_begun,
    decode_savepoint,
    encode_savepoint,
)
from snapshot.formats.object_names import parse_base_name, parse_data_name
from snapshot.formats.record import parse_record_name
from snapshot.retention.deletable import PROBE_PREFIX
from snapshot.storage.object_store import CreateOutcome, ObjectStore
from statebackend.errors import (
    CorruptionError,
    NotRestorableError,
    ObjectNotFoundError,
    SettingError,
    StateBackendError,
    UnsupportedFormatError,
)

__all__ = ["SavepointFolder", "check_begun", "delete_savepoint", "is_probe"]


class SavepointFolder:
    """A folder with `savepoint.begun` in it, which says whose it is.

    Attributes:
        store: the folder. begun: what `savepoint.begun` says. encoded: its bytes.
    """

    def __init__(self, store: ObjectStore, begun: Begun) -> None:
        """Take the folder, which must be empty but for what a probe has left that was cut.

        Raises:
            SettingError: it is not.
        """
        self.store: Final = store
        self.begun: Final = begun
        self.encoded: Final = msgspec.json.encode(begun)
        taken = any(not is_probe(info.name) for info in store.list(""))
        if taken or store.create(BEGUN_NAME, [self.encoded]) is CreateOutcome.EXISTS:
            raise SettingError(
                f"A savepoint cannot go to {store.uri}: something lies there already.",
                todo="Give another place; `statebackend savepoint delete` removes a savepoint.",
            )

    def check(self) -> None:
        """Refuse to go on with what somebody has deleted meanwhile.

        Raises:
            NotRestorableError: naming the savepoint.
        """
        check_begun(self.store, self.encoded)

    def finish(self, savepoint: Savepoint) -> None:
        """Say that it is whole, in one write and the last one.

        Raises:
            NotRestorableError: see :meth:`check`.
        """
        self.check()
        self.store.put(SAVEPOINT_NAME, [encode_savepoint(savepoint)])

    def leave(self) -> None:
        """Remove what was written in vain, as far as the store lets it."""
        with suppress(StateBackendError):
            # Somebody may have deleted it meanwhile, and made another in the same place.
            if self.store.get(BEGUN_NAME) == self.encoded:
                delete_savepoint(self.store)


def check_begun(store: ObjectStore, begun: bytes) -> None:
    """Refuse to go on in a folder that somebody has deleted meanwhile.

    Args:
        begun: the bytes of `savepoint.begun`.

    Raises:
        NotRestorableError: naming the savepoint.
    """
    try:
        found = store.get(BEGUN_NAME)
    except ObjectNotFoundError:
        found = b""
    if found != begun:
        its = msgspec.json.decode(begun, type=Begun)
        raise NotRestorableError(
            f"The savepoint {its.id} in {store.uri} was deleted while it was made"
            f"{', and another one begun there' if found else ''}.",
            todo="Make it again. What lies in its folder is nobody's, and may be deleted.",
        )


def is_probe(name: str) -> bool:
    """Whether an object is what a cut probe of the store has left."""
    return name.startswith(PROBE_PREFIX) and name.count("/") == 1


def _is_ours(name: str) -> bool:
    """Whether an object is a savepoint's own; a job below its folder may be called ``data``."""
    if name.startswith(PROBE_PREFIX):
        return is_probe(name)
    parsed = (parse_record_name(name), parse_data_name(name), parse_base_name(name))
    return name.startswith(SPARK_FOLDER) or any(one is not None for one in parsed)


def delete_savepoint(store: ObjectStore) -> list[str]:
    """Remove a savepoint, or what is left of one. May be cut anywhere, and repeated.

    Returns:
        what else lies in its folder, which is left alone.

    Raises:
        NotRestorableError: there is none.
    """
    names = [info.name for info in store.list("")]
    if not {SAVEPOINT_NAME, BEGUN_NAME} & set(names):
        raise NotRestorableError(
            f"There is no savepoint in {store.uri}, so nothing is deleted.",
            todo="Check the URI; `statebackend savepoint list` shows what there is.",
        )
    if BEGUN_NAME in names:
        _mark_deleted(store)  # from here on it does not exist, whatever lands late
        names = [info.name for info in store.list("")]  # what was written before the mark
    store.delete([SAVEPOINT_NAME])
    ours = [name for name in names if _is_ours(name)]
    for start in range(0, len(ours), 1000):
        store.delete(ours[start : start + 1000])
    store.delete([BEGUN_NAME])  # by which what is left is known
    return [name for name in names if name not in (*ours, SAVEPOINT_NAME, BEGUN_NAME)]


def _mark_deleted(store: ObjectStore) -> None:
    """Say in `savepoint.begun` that it is deleted, unless it says so or is gone meanwhile."""
    try:
        begun = decode_begun(store.get(BEGUN_NAME))
        if begun is None:
            savepoint = decode_savepoint(store.get(SAVEPOINT_NAME), store.uri)
            begun = Begun(id=savepoint.id, job=savepoint.job, job_uri="", created_ms=0)
    except (ObjectNotFoundError, CorruptionError, UnsupportedFormatError):
        return  # no late write is a savepoint here
    if not begun.deleted:
        deleted = msgspec.structs.replace(begun, deleted=True)
        store.put(BEGUN_NAME, [msgspec.json.encode(deleted)])
