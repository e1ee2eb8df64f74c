"""The layers over a subtask's store: what each attempt froze, until the store holds it."""

from __future__ import annotations

from collections import deque

from statebackend.state.blocks import SortedRows
from statebackend.state.overlay import FrozenOverlay, Overlay
from statebackend.state.spill import Run
from statebackend.state.table import StateTable

__all__ = ["AttemptLayers"]


class AttemptLayers:
    """The layers of a table, by attempt.

    A layer goes when it is in the store. That of an attempt that was aborted stays: what it holds
    is a part of the next epoch. Only `stored` is called by another thread than the subtask's own.

    Attributes:
        confirmed: the newest attempt that is an epoch.
    """

    def __init__(self, table: StateTable) -> None:
        self._table = table
        self._layers: list[tuple[int, FrozenOverlay]] = []  # the oldest first
        self._stored: deque[int] = deque()  # attempts whose rows are in the store by now
        self.confirmed = -1

    def freeze(self, attempt: int, epoch: int) -> tuple[tuple[int, FrozenOverlay], ...]:
        """Freeze what was written since the attempt before; all layers that there are now."""
        self._layers.append((attempt, self._table.freeze(epoch)))
        return tuple(self._layers)

    def stored(self, attempt: int) -> None:
        """Everything up to a confirmed attempt is in the store."""
        self._stored.append(attempt)

    def tidy(self) -> None:
        """Let go of what is in the store by now; costs nothing where nothing is."""
        while self._stored:
            attempt = self._stored.popleft()
            while self._layers and self._layers[0][0] <= attempt:
                self._table.applied(self._layers.pop(0)[1])

    def merge(self, attempt: int, epoch: int, rows: FrozenOverlay) -> None:
        """Put one layer in the place of those up to an aborted attempt, if they are many.

        Attempt after attempt may fail: reading must not go through ever more layers.

        Args:
            rows: what they hold, as the attempt has joined them.
        """
        self.tidy()
        if self._layers[0][0] <= self.confirmed:
            return  # that one is on its way to the store, alone
        merged = [layer for number, layer in self._layers if number <= attempt]
        if len(merged) <= 2 or rows.columns is None:
            return
        run = Run.in_memory([SortedRows(*rows.columns)])
        one = FrozenOverlay(epoch, Overlay(runs=[run]))
        self._table.put_joined(one, merged)
        self._layers[: len(merged)] = [(attempt, one)]
