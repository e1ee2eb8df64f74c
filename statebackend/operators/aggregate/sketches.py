"""The approximate count of different values, by HyperLogLog sketches of Apache DataSketches.

A sketch of ``2**lg_k`` registers has a relative standard deviation of ``1.04 / sqrt(2**lg_k)``
(Flajolet et al., HyperLogLog, 2007); while it has seen few values it is exact. State holds the
library's own compact serialisation, which is the same in all its languages.
"""

# ruff: noqa: D102  (Accumulator and EntryStore say what their methods do)

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from pyspark.sql import types as T

from statebackend.errors import EnvironmentMissingError, SettingError
from statebackend.operators.aggregate.accumulators import Accumulator, Columns
from statebackend.operators.aggregate.arrow_numpy import Ints, numpy_of
from statebackend.operators.aggregate.value_counts import Pairs
from statebackend.texts import install_extra

__all__ = ["ApproxCountDistinct"]

_LG_LEAST: Final = 7
_LG_MOST: Final = 21


class ApproxCountDistinct(Accumulator):
    """About how many different values there are: bigint.

    Raises:
        SettingError: an accuracy that no sketch has.
        EnvironmentMissingError: the library is not installed.
    """

    function = "approx_count_distinct"
    result_type = T.LongType()

    def __init__(self, name: str, inputs: Sequence[str], dtype: T.DataType, *, rsd: float) -> None:
        super().__init__(name, inputs, {"sketch": T.BinaryType()})
        _library()
        self._dtype = dtype
        self.lg_k = _registers(name, rsd)

    @property
    def meaning(self) -> str:
        # A finer sketch that took in a coarse one is no finer; values are known by their hashes.
        return f"{super().meaning} of {_hashed(self._dtype)} in {1 << self.lg_k} registers"

    def lift(self, columns: Columns, starts: Ints) -> list[pa.Array]:
        library, groups = _library(), len(starts) - 1
        group = np.repeat(np.arange(groups), np.diff(starts))
        pairs = Pairs.of(group, columns, [self._dtype])
        values = _hashable(pairs.values[0])
        bounds = np.searchsorted(pairs.group, np.arange(groups + 1)).tolist()
        made: list[bytes | None] = []
        for begin, end in itertools.pairwise(bounds):
            if begin == end:
                made.append(None)
                continue
            sketch = library.hll_sketch(self.lg_k, library.HLL_4)
            update: Callable[[Any], None] = sketch.update
            for value in values[begin:end]:
                update(value)
            made.append(sketch.serialize_compact())
        return [pa.array(made, pa.binary())]

    def merge(self, accumulators: Columns, starts: Ints) -> list[pa.Array]:
        library = _library()
        sketches = accumulators[0].to_pylist()
        merged: list[bytes | None] = []
        bounds = starts.tolist()
        for begin, end in itertools.pairwise(bounds):
            parts = [part for part in sketches[begin:end] if part is not None]
            if len(parts) < 2:
                merged.append(parts[0] if parts else None)
                continue
            union = library.hll_union(self.lg_k)
            for part in parts:
                union.update(library.hll_sketch.deserialize(part))
            merged.append(union.get_result(library.HLL_4).serialize_compact())
        return [pa.array(merged, pa.binary())]

    def result(self, accumulators: Columns) -> pa.Array:
        read = _library().hll_sketch.deserialize
        found = [
            0 if data is None else round(read(data).get_estimate())
            for data in accumulators[0].to_pylist()
        ]
        return pa.array(found, pa.int64())


def _library() -> Any:
    try:
        return import_module("datasketches")
    except ImportError as error:
        raise EnvironmentMissingError(
            "approx_count_distinct needs the package datasketches, which is not installed.",
            todo=install_extra("sketches", "on the driver and on every executor")
            + " Or use count_distinct.",
        ) from error


def _registers(name: str, rsd: Any) -> int:
    number = isinstance(rsd, int | float) and not isinstance(rsd, bool)
    lg_k = math.ceil(2 * math.log2(1.04 / rsd)) if number and rsd > 0 else _LG_MOST + 1
    if lg_k > _LG_MOST or rsd > 0.09:
        raise SettingError(
            f"Aggregation {name!r}: approx_count_distinct was asked for rsd={rsd!r}.",
            todo="Give a relative standard deviation from 0.0008 to 0.09.",
        )
    return max(lg_k, _LG_LEAST)


def _hashed(dtype: T.DataType) -> str:
    """What equal values of a type are hashed as; types of one name give the same hashes."""
    if isinstance(dtype, T.IntegralType):
        return "integers"
    if isinstance(dtype, T.FloatType | T.DoubleType):
        return "floats"
    if isinstance(dtype, T.DecimalType):
        return f"decimals of scale {dtype.scale}"
    return dtype.simpleString()


def _hashable(column: pa.Array) -> list[Any]:
    """Values as the library takes them; equal values, and only those, become equal ones."""
    kind = column.type
    if pt.is_string(kind):
        # The library passes over empty strings.
        return ["s" + text for text in column.to_pylist()]
    if pt.is_binary(kind):
        return ["s" + data.decode("latin-1") for data in column.to_pylist()]
    if pt.is_decimal(kind):
        return [str(value) for value in column.to_pylist()]
    values: list[Any] = numpy_of(column)[0].tolist()
    return values
