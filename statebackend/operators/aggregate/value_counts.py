"""Aggregations that keep every value: the exact count of different ones, and the most frequent.

Values are entries of a map state, one for each group and value; the accumulator beside it holds
what is shown (a count, the top values).
"""

# ruff: noqa: D102  (Accumulator and EntryStore say what their methods do)

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from statebackend.operators.aggregate.accumulators import Accumulator, Columns, zero_filled
from statebackend.operators.aggregate.arrow_numpy import (
    Ints,
    arrow_of,
    bools_of,
    flags,
    indices_of,
    numpy_of,
    take,
)
from statebackend.operators.aggregate.extremes import ranks_of
from statebackend.operators.aggregate.row_numbers import first_rows, group_rows
from statebackend.schema.types import arrow_type
from statebackend.state.binary_columns import places_array

__all__ = ["CountDistinct", "EntryStore", "Pairs", "TopK", "ValueAccumulator"]


class EntryStore(Protocol):
    """The entries of n groups: every call is for entries (group[i], values[i])."""

    def get(self, group: Ints, values: Columns) -> pa.RecordBatch: ...

    def exists(self, group: Ints, values: Columns) -> pa.BooleanArray: ...

    def put(self, group: Ints, values: Columns, entries: Columns) -> None: ...


class Pairs:
    """Different (group, value) pairs.

    Attributes:
        group: int64, ascending. values: the value columns. counts: int64, how often each came.
    """

    def __init__(self, group: Ints, values: list[pa.Array], counts: Ints) -> None:
        self.group, self.values, self.counts = group, values, counts

    @classmethod
    def of(
        cls,
        group: Ints,
        values: Columns,
        dtypes: Sequence[T.DataType],
        weights: Ints | None = None,
    ) -> Pairs:
        """The pairs in rows; those with a null are left out.

        Args:
            group: int64, ascending, of each row.
            values: columns of as many rows.
            dtypes: their types.
            weights: what a row counts; None: one.
        """
        for column in values:
            if column.null_count:
                kept = pc.is_valid(column)
                mask = bools_of(kept)
                values = [other.filter(kept) for other in values]
                group = group[mask]
                weights = None if weights is None else weights[mask]
                return cls.of(group, values, dtypes, weights)
        grouped = group_rows([places_array(group), *values], [T.LongType(), *dtypes])
        first = first_rows(grouped)
        if weights is None:
            counts = grouped.counts()
        else:
            counts = np.zeros(grouped.groups, np.int64)
            np.add.at(counts, grouped.codes, weights)
        return cls(group[first], [take(column, first) for column in values], counts)


class ValueAccumulator(Accumulator):
    """An aggregation with a map state of values.

    Attributes:
        value_types: of the columns that make up a value.
        entry_schema: of what is kept for each.
    """

    mergeable: ClassVar[bool] = False
    value_types: list[T.DataType]
    entry_schema: T.StructType

    def lift(self, columns: Columns, starts: Ints) -> list[pa.Array]:
        self._refuse()

    def merge(self, accumulators: Columns, starts: Ints) -> list[pa.Array]:
        """The first of each group: values that move between groups are counted by :meth:`apply`."""
        return [take(column, starts[:-1]) for column in accumulators]

    def combine(self, old: Columns, new: Columns) -> list[pa.Array]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotImplementedError("values are counted by apply(), against the state")

    @abstractmethod
    def apply(self, store: EntryStore, pairs: Pairs, old: Columns) -> list[pa.Array]:
        """Count pairs in the state.

        Args:
            old: the accumulators of n groups.

        Returns:
            Their new accumulators.
        """

    @abstractmethod
    def weights(self, entries: pa.RecordBatch) -> Ints:
        """What stored entries count when they move to another group."""


class CountDistinct(ValueAccumulator):
    """How many different values there are: bigint, exact."""

    function = "count_distinct"
    result_type = T.LongType()

    def __init__(self, name: str, inputs: Sequence[str], dtypes: Sequence[T.DataType]) -> None:
        super().__init__(name, inputs, {"n": T.LongType()})
        self.value_types = list(dtypes)
        self.entry_schema = T.StructType([T.StructField("seen", T.BooleanType())])

    def apply(self, store: EntryStore, pairs: Pairs, old: Columns) -> list[pa.Array]:
        counts = zero_filled(*numpy_of(old[0]))
        if not len(pairs.group):
            return [arrow_of(counts, None, pa.int64())]
        known = store.exists(pairs.group, pairs.values)
        fresh = ~bools_of(known)
        group = pairs.group[fresh]
        if len(group):
            places = np.flatnonzero(fresh)
            values = [take(column, places) for column in pairs.values]
            store.put(group, values, [flags(np.ones(len(group), bool))])
        added = np.bincount(group, minlength=len(counts))
        return [arrow_of(counts + added, None, pa.int64())]

    def weights(self, entries: pa.RecordBatch) -> Ints:
        return np.ones(entries.num_rows, np.int64)

    def result(self, accumulators: Columns) -> pa.Array:
        return arrow_of(zero_filled(*numpy_of(accumulators[0])), None, pa.int64())


class TopK(ValueAccumulator):
    """The most frequent values, exact.

    Counts only grow, so the new top values are among the old ones and those that were touched. (Not
    if ``k`` grew too: it is part of the meaning.)
    """

    function = "top_k"

    def __init__(self, name: str, inputs: Sequence[str], dtype: T.DataType, k: int) -> None:
        item = T.StructType([T.StructField("value", dtype), T.StructField("count", T.LongType())])
        super().__init__(name, inputs, {"top": T.ArrayType(item)})
        self.result_type = T.ArrayType(item)
        self.value_types = [dtype]
        self.entry_schema = T.StructType([T.StructField("count", T.LongType())])
        self._k = k

    @property
    def meaning(self) -> str:
        return f"{self.function}({self.inputs[0]}, {self._k})"

    def apply(self, store: EntryStore, pairs: Pairs, old: Columns) -> list[pa.Array]:
        if not len(pairs.group):
            return list(old)
        before = zero_filled(*numpy_of(store.get(pairs.group, pairs.values).column(0)))
        counts = before + pairs.counts
        store.put(pairs.group, pairs.values, [places_array(counts)])
        groups = len(old[0])
        shown = old[0].flatten()
        lengths = indices_of(pc.list_value_length(old[0]).fill_null(0))
        group = np.concatenate([np.repeat(np.arange(groups), lengths), pairs.group])
        values = pa.concat_arrays([shown.field(0), pairs.values[0]])
        known = np.concatenate([numpy_of(shown.field(1))[0], counts])
        return [self._best(groups, group, values, known)]

    def _best(self, groups: int, group: Ints, values: pa.Array, counts: Ints) -> pa.Array:
        same = group_rows([places_array(group), values], [T.LongType(), self.value_types[0]])
        first = first_rows(same)
        # Of a value's two counts, the later one is the larger.
        most = np.zeros(same.groups, np.int64)
        np.maximum.at(most, same.codes, counts)
        group, values = group[first], take(values, first)
        order = np.lexsort((ranks_of(values), -most, group))
        group = group[order]
        place = np.arange(len(group)) - np.searchsorted(group, group)
        kept = place < self._k
        chosen = order[kept]
        offsets = np.zeros(groups + 1, np.int32)
        np.cumsum(np.bincount(group[kept], minlength=groups), out=offsets[1:])
        items = pa.StructArray.from_arrays(
            [take(values, chosen), places_array(most[chosen])],
            fields=list(arrow_type(self.result_type).value_type),
        )
        return pa.ListArray.from_arrays(
            arrow_of(offsets, None, pa.int32()), items, type=arrow_type(self.result_type)
        )

    def weights(self, entries: pa.RecordBatch) -> Ints:
        counts: Ints = numpy_of(entries.column(0))[0]
        return counts

    def result(self, accumulators: Columns) -> pa.Array:
        (top,) = accumulators
        if not top.null_count:
            return top
        empty: Any = pa.array([[]], top.type)[0]
        return top.fill_null(empty)
