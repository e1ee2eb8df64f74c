"""The folder of a savepoint that is being made: taken, still ours at the end, or left again."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import msgspec

from recovery.inspect.job_list import BEGUN_NAME, SAVEPOINT_NAME
from recovery.savepoints.savepoint import (
    Begun,
    Savepoint,
    delete_savepoint,
    encode_savepoint,
    is_probe,
)
from snapshot.storage.object_store import CreateOutcome, ObjectStore
from statebackend.errors import (
    NotRestorableError,
    ObjectNotFoundError,
    SettingError,
    StateBackendError,
)

__all__ = ["SavepointFolder", "check_begun"]


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
