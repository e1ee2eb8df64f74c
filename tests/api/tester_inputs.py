"""Rows, a processor that keeps more than state, and the size of a tester's stores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row

from statebackend.api.context import ProcessorContext
from statebackend.api.processors import KeyedProcessor
from statebackend.testing.processor_tester import ProcessorTester


def words(*some: str) -> list[Row]:
    return [Row(word=word) for word in some]


def amounts(*some: int) -> list[Row]:
    return [Row(amount=amount) for amount in some]


def stored(tester: ProcessorTester) -> int:
    """Entries in all stores."""
    return sum(len(list(store.scan())) for store in tester._operator.stores)


class Leaky(KeyedProcessor):
    """Keeps a count beside state, as nobody should."""

    def __init__(self) -> None:
        self.beside = 0

    def open(self, ctx: ProcessorContext) -> None:
        self.count = ctx.value_state("count", "n bigint")

    def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> Iterator[tuple[Any, ...]]:
        self.beside += 1
        self.count.update(((self.count.get() or (0,))[0] + 1,))
        yield self.beside, self.count.get()[0]
