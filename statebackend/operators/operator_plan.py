"""An operator as its code sees it, and the calls that an epoch makes into its processor."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql.types import StructType

from statebackend.operators.declared_states import StateDeclaration
from statebackend.operators.input.group_by_key import Groups
from statebackend.schema.keys.key_codec import KeyCodec

__all__ = ["BatchCalls", "Calls", "EpochFigures", "OperatorPlan"]


@dataclass(frozen=True)
class OperatorPlan:
    """An operator, as its code sees it.

    ``flavour``: rows, pandas, keyed, sides, broadcast or arrow.

    ``initial_schema``, ``initial_key_positions``: of the initial state, where there is one.
    ``timezone``: in which timestamps are shown. ``frame_rows``, ``frame_bytes``: the most that a
    frame of pandas input has.
    ``sides``: of a connected operator, the schemas of its left and right input.
    ``shown``: how many of the input's first columns a processor sees; None: all.
    ``withdrawn``: names of states that a StatefulProcessor's ``init`` asks for, and then deletes.
    ``rules_schema``: of rows that go to every subtask.
    """

    uid: str
    flavour: str
    input_schema: StructType
    key_positions: tuple[int, ...]
    output_schema: StructType
    states: dict[str, StateDeclaration] = field(default_factory=dict)
    time_mode: str = "none"
    timezone: str = "UTC"
    frame_rows: int = 10_000
    frame_bytes: int = 1 << 31
    initial_schema: StructType | None = None
    initial_key_positions: tuple[int, ...] = ()
    sides: tuple[StructType, StructType] | None = None
    rules_schema: StructType | None = None
    withdrawn: frozenset[str] = frozenset()
    shown: int | None = None

    @functools.cached_property
    def key_codec(self) -> KeyCodec:
        """Of the operator's key; a third of a millisecond to make."""
        return KeyCodec(StructType([self.input_schema[i] for i in self.key_positions]))


@dataclass
class EpochFigures:
    """What an epoch did.

    ``next_timer_ms``: the earliest timer that is left. ``late_rows``: those that the processor
    itself left out as too late.
    """

    timers_fired: int = 0
    expired: int = 0
    next_timer_ms: int | None = None
    late_rows: int = 0


class Calls(Protocol):
    """The calls into a processor, a key at a time."""

    def rows(self, key: tuple[Any, ...], rows: Iterator[Any]) -> Iterable[Any] | None:
        """Input of one key."""

    def initial(self, key: tuple[Any, ...], rows: Iterator[Any]) -> None:
        """Initial state of one key."""

    def timer(self, key: tuple[Any, ...], at_ms: int) -> Iterable[Any] | None:
        """A timer of one key that is due."""

    def close(self) -> None:
        """The end of the epoch."""


class BatchCalls(Protocol):
    """The calls into a vectorised processor."""

    @property
    def late_rows(self) -> int:
        """Rows that it left out as too late."""

    def initial(self, parts: Iterable[Groups]) -> Iterator[pa.RecordBatch]:
        """Initial state, grouped."""

    def input(self, parts: Iterator[Groups]) -> Iterator[pa.RecordBatch]:
        """Input, grouped."""

    def timers(self, now_ms: int, figures: EpochFigures) -> Iterator[pa.RecordBatch]:
        """All timers that are due."""

    def close(self) -> None:
        """The end of the epoch."""
