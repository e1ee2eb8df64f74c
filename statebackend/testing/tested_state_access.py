"""Looks into the states of an operator under test from outside, and sets them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from statebackend.keygroups import subtask_of
from statebackend.operators.declared_states import EpochState, EpochTimes
from statebackend.operators.errors.spark_errors import TesterUseError, UnknownStateError
from statebackend.operators.redeclared_states import versions_of
from statebackend.state.cells import KeyCursor, ValueCell
from statebackend.state.table import StateTable
from statebackend.state.timers import TimerIndex
from statebackend.state.ttl_cells import TtlValueCell
from statebackend.testing.tested_operator import OperatorUnderTest

__all__ = ["StateAccess"]

# Folded states are values to whoever looks at them from outside.
_RAW: Final = {
    ("value", False): ValueCell,
    ("value", True): TtlValueCell,
    ("reducing", False): ValueCell,
    ("reducing", True): TtlValueCell,
    ("aggregating", False): ValueCell,
    ("aggregating", True): TtlValueCell,
}


class StateAccess:
    """The states of an operator under test, between its epochs."""

    def __init__(self, operator: OperatorUnderTest) -> None:
        self._operator = operator

    @contextmanager
    def cell(
        self, name: str, kinds: Sequence[str], key: Any, times: EpochTimes, *, write: bool = False
    ) -> Iterator[Any]:
        """The cell of a state with ``key`` current; what is written counts only with ``write``.

        Raises:
            UnknownStateError: the processor has no such state.
        """
        declared = self._operator.states.declared
        found = declared.get(name)
        if found is None or found.kind not in kinds:
            has = ", ".join(f"{one.name!r} ({one.kind})" for one in declared.values()) or "none"
            raise UnknownStateError(
                f"State {name} has not been initialized as one of kind {' or '.join(kinds)}.",
                todo=f"The processor's states are: {has}.",
            )
        with self._at(key, write=write) as (cursor, table):
            state = EpochState(
                cursor,
                table,
                declared=declared,
                ids=self._operator.states.ids,
                times=times,
                versions=versions_of(declared),
            )
            raw = {"classes": _RAW} if (found.kind, False) in _RAW else {}
            cell = state.cell(name, found.kind, **raw)
            self._load(cursor, key)
            yield cell

    def operator_state(self, name: str, subtask: int, kinds: Sequence[str]) -> Any:
        """A state that belongs to no key, to be looked at.

        Raises:
            TesterUseError: the processor has no such state, or there is no such subtask.
        """
        operator = self._operator
        declared, parallelism = operator.states.declared, operator.parallelism
        found = declared.get(name)
        if found is None or found.kind not in kinds or not 0 <= subtask < parallelism:
            has = ", ".join(f"{one.name!r} ({one.kind})" for one in declared.values())
            raise TesterUseError(
                f"State {name} of subtask {subtask} of {parallelism} has not been initialized "
                f"as one of kind {' or '.join(kinds)}.",
                todo=f"The processor's states are: {has or 'none'}.",
            )
        state = EpochState(
            KeyCursor(),
            StateTable(operator.stores[subtask]),
            declared=declared,
            ids=operator.states.ids,
            times=EpochTimes(),
            versions=versions_of(declared),
            stored=operator.stored(subtask),
        )
        return state.operator_state(name, found.kind)

    def timers(self, key: Any) -> list[int]:
        """The times of a key's timers."""
        with self._at(key, write=False) as (cursor, table):
            index = TimerIndex(cursor, table)
            self._load(cursor, key)
            return index.list()

    @contextmanager
    def _at(self, key: Any, *, write: bool) -> Iterator[tuple[KeyCursor, StateTable]]:
        operator = self._operator
        _, group, _ = operator.keys.place(key)
        subtask = subtask_of(group, operator.parallelism, operator.keys.max_parallelism)
        table = StateTable(operator.stores[subtask])
        yield KeyCursor(), table
        if write:
            operator.apply(subtask, *table.freeze(operator.epochs).sorted())

    def _load(self, cursor: KeyCursor, key: Any) -> None:
        _, group, encoded = self._operator.keys.place(key)
        cursor.load([group.to_bytes(2, "big")], [encoded])
        cursor.index = 0
