"""Local copies of subtasks of another parallelism, while a new one is made from them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable

from recovery.local.local_copies import LocalSubtask
from recovery.local.store_directory import StoreDirectory
from snapshot.protocol.messages import AncestorCopy, LocalCopy
from statebackend.errors import LocalCopyError, StoreBusyError
from statebackend.keygroups import KeyGroupRange
from statebackend.rocks.parted import Store
from statebackend.rocks.store import RocksSettings

__all__ = ["Ancestors"]

_log = logging.getLogger("statebackend.recovery")


class Ancestors:
    """What was found on this host, by key groups; leased from :meth:`take` to :meth:`release`.

    Several subtasks may be made from one copy, each in a process of its own: they take turns, in
    one order everywhere. Each holds it while it is described, and while its files are linked; not
    while the driver answers, or with many of them the last would not wait for so long.

    Attributes:
        refused: why a copy that is here is not used, by the last :meth:`look`.
    """

    def __init__(
        self, local: LocalSubtask, settings: RocksSettings, *, lease_timeout_s: float
    ) -> None:
        self._local, self._settings = local, settings
        self._lease_timeout_s = lease_timeout_s
        self._held: dict[tuple[int, int], StoreDirectory] = {}
        self._last: dict[tuple[int, int], StoreDirectory] = {}
        self._found: dict[tuple[int, int], LocalCopy] = {}
        self.refused: list[str] = []

    def look(self, wanted: Iterable[tuple[int, int]], *, deltas: bool = True) -> list[AncestorCopy]:
        """Open what is here of some subtasks, describe it, and let others have it.

        Args:
            deltas: whether local deltas are to be trusted.

        Raises:
            LocalDirError: the local directory cannot be used.
        """
        self._found, self.refused = {}, []
        for groups in sorted(wanted):
            copy = self._open(groups, deltas=deltas)
            self.release()
            if copy is not None:
                self._found[groups] = copy
        return [
            AncestorCopy(key_group_start=groups[0], key_group_end=groups[1], copy=copy)
            for groups, copy in self._found.items()
        ]

    def _open(self, groups: tuple[int, int], *, deltas: bool) -> LocalCopy | None:
        held, reason = self._local.acquire_other(KeyGroupRange(*groups), self._lease_timeout_s)
        if held is None:
            if reason:
                self.refused.append(f"key groups {groups[0]}-{groups[1]}: {reason}")
            return None
        try:
            held.open_store(self._settings)
            held.settle()
            copy = held.describe(deltas=deltas)
        except LocalCopyError as error:
            self.refused.append(error.what)
            if not isinstance(error, StoreBusyError):
                held.mark_bad(error.what)
            _let_go(held)
            return None
        except BaseException:
            _let_go(held)
            raise
        self._held[groups] = self._last[groups] = held
        return copy

    def take(self, wanted: Iterable[tuple[int, int]]) -> None:
        """Open once more some of what was found.

        Raises:
            LocalCopyError: it is not there any more, or is not what it was.
        """
        for groups in sorted(wanted):
            now = self._open(groups, deltas=False)
            if now is None or _standing(now) != _standing(self._found[groups]):
                why = f" ({self.refused[-1]})" if now is None and self.refused else ""
                raise LocalCopyError(
                    f"The local copy of key groups {groups[0]} to {groups[1]} has changed{why}.",
                    todo="Nothing to do: it is looked for again.",
                )

    def store(self, groups: tuple[int, int]) -> Store:
        """An open store; only until :meth:`release`."""
        store = self._held[groups].store
        assert store is not None
        return store

    def directory(self, groups: tuple[int, int]) -> StoreDirectory:
        """Where its local deltas lie: they may be read after :meth:`release` too."""
        return self._last[groups]

    def mark_bad(self, store: Store, reason: str) -> None:
        """Keep anybody from using a copy that turned out to be damaged, if it is one of these."""
        for held in self._held.values():
            if held.store is store:
                held.mark_bad(reason)

    def release(self) -> None:
        """Close the stores and let others have them."""
        held, self._held = self._held, {}
        for one in held.values():
            _let_go(one)


def _standing(copy: LocalCopy) -> tuple[int | None, str, str, int]:
    """Where a copy stands; one that somebody has begun to apply another epoch to is another."""
    return copy.epoch, copy.chain, copy.applying, copy.applying_epoch


def _let_go(held: StoreDirectory) -> None:
    with contextlib.suppress(LocalCopyError):  # marked bad by then
        held.release()
