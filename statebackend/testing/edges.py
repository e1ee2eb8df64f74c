"""The edges of an epoch under test: input as the test gave it, output as the processor did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

__all__ = ["Collector", "ItemReader", "Items"]


class Items:
    """Takes the place of the table of input rows: one "row" is all that one key has."""

    nbytes = 0

    def __init__(self, items: Sequence[tuple[tuple[Any, ...], Any]]) -> None:
        self.items = items
        self.num_rows = len(items)

    def slice(self, offset: int, length: int) -> Items:
        """As a table's."""
        return Items(self.items[offset : offset + length])


class ItemReader:
    """Gives the processor's calls the input as the test gave it."""

    def chunk(
        self, table: Items, starts: Sequence[int]
    ) -> tuple[list[tuple[Any, ...]], list[Iterator[Any]]]:
        """The keys, and what each was given."""
        return [key for key, _ in table.items], [given for _, given in table.items]

    def key(self, table: Items) -> tuple[Any, ...]:
        """The key of the only item."""
        return table.items[0][0]

    def piece(self, table: Items) -> Iterable[Any]:
        """What the only item was given."""
        return table.items[0][1]  # type: ignore[no-any-return]


class Collector:
    """Keeps the output as it comes."""

    pending = 0

    def __init__(self) -> None:
        self.output: list[Any] = []

    def collect(self, output: Iterable[Any]) -> Iterator[pa.RecordBatch]:
        """Keep some; nothing is to be written."""
        self.output.extend(output)
        return iter(())

    def take(self) -> pa.RecordBatch:
        """What is to be written: never asked for."""
        raise AssertionError("nothing is ever pending")
