"""The states of an operator under test that belong to no key, as a checkpoint keeps them."""

from __future__ import annotations

from statebackend.errors import BroadcastDivergedError
from statebackend.operators.operator_snapshot import OperatorSnapshot, StoredOperatorState
from statebackend.state.operator_state import decode_lists, decode_maps, encode_lists, redistribute

__all__ = ["EpochOfTester", "HeldByTester"]


class HeldByTester:
    """Blobs after the last epoch: each subtask's lists, and the one copy of broadcast maps."""

    def __init__(self) -> None:
        self.lists: dict[int, bytes] = {}
        self.maps: bytes | None = None

    def stored(self, subtask: int) -> StoredOperatorState:
        """What a subtask begins with."""
        lists = self.lists.get(subtask)
        return StoredOperatorState(
            {} if lists is None else decode_lists(lists),
            {} if self.maps is None else decode_maps(self.maps),
        )

    def redistribute(self, parallelism: int) -> None:
        """Other subtasks take over."""
        old = [decode_lists(blob) for _, blob in sorted(self.lists.items())]
        if old:
            new = [redistribute(old, parallelism, index) for index in range(parallelism)]
            self.lists = {index: encode_lists(one) for index, one in enumerate(new)}

    def epoch(self) -> EpochOfTester:
        """One epoch, of which nothing counts until it is committed."""
        return EpochOfTester(self)


class EpochOfTester:
    """What the subtasks ended an epoch with."""

    def __init__(self, held: HeldByTester) -> None:
        self._held = held
        self._taken: dict[int, OperatorSnapshot] = {}

    def stored(self, subtask: int) -> StoredOperatorState:
        """What a subtask begins with."""
        return self._held.stored(subtask)

    def take(self, subtask: int, snapshot: OperatorSnapshot) -> None:
        """A subtask has ended its epoch."""
        self._taken[subtask] = snapshot

    def commit(self) -> None:
        """All subtasks that had one have ended their epoch.

        Raises:
            BroadcastDivergedError: they came to different broadcast states.
        """
        maps = {one.maps for one in self._taken.values()}
        if len(maps) > 1:
            raise BroadcastDivergedError(
                f"The {len(self._taken)} subtasks came to different broadcast states in one epoch.",
                todo="process_broadcast() must go by its rows and the broadcast state alone: not "
                "by random numbers, the clock, or what is of one subtask.",
            )
        for subtask, one in self._taken.items():
            if one.lists is not None:
                self._held.lists[subtask] = one.lists
            else:
                self._held.lists.pop(subtask, None)
        if maps:
            self._held.maps = maps.pop()
