"""Makes DataFrames of ranges of rows out of columns: by pandas' inner parts, or as anyone can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

__all__ = ["Array", "Make", "choose_maker", "frame_maker", "inner_maker", "public_maker"]

Array = NDArray[Any]
Make = Callable[[int, int], Any]
"""From a first row and an end to the frame of these rows."""


def public_maker(names: Sequence[str], columns: Sequence[Array]) -> Make:
    """Makes frames as anyone can, at some ten times the cost."""

    def make(first: int, end: int) -> Any:
        frame = pd.DataFrame(
            {
                i: pd.Series(values[first:end].copy(), dtype=values.dtype)
                for i, values in enumerate(columns)
            }
        )
        frame.columns = list(names)
        return frame

    return make


def inner_maker(names: Sequence[str], columns: Sequence[Array]) -> Make:
    """Makes frames out of pandas' inner parts (2.2 and 2.3), one block per type of column."""
    from pandas._libs.internals import BlockPlacement
    from pandas.core.arrays import DatetimeArray, TimedeltaArray
    from pandas.core.indexes.range import RangeIndex
    from pandas.core.internals.blocks import DatetimeLikeBlock, NumpyBlock
    from pandas.core.internals.managers import BlockManager

    positions: dict[np.dtype[Any], list[int]] = {}
    for i, values in enumerate(columns):
        positions.setdefault(values.dtype, []).append(i)
    parts = []
    for dtype, places in positions.items():
        stacked = np.empty((len(places), len(columns[places[0]])), dtype)
        for row, i in enumerate(places):
            stacked[row] = columns[i]
        wrap = {"M": DatetimeArray._simple_new, "m": TimedeltaArray._simple_new}.get(dtype.kind)
        parts.append((stacked, BlockPlacement(places), dtype, wrap))
    labels = pd.Index(list(names), dtype=object)
    from_manager = pd.DataFrame._from_mgr

    def make(first: int, end: int) -> Any:
        blocks = tuple(
            [
                NumpyBlock(stacked[:, first:end].copy(), placement=places, ndim=2)
                if wrap is None
                else DatetimeLikeBlock(
                    wrap(stacked[:, first:end].copy(), dtype=dtype), placement=places, ndim=2
                )
                for stacked, places, dtype, wrap in parts
            ]
        )
        # Labels of its own: a user may name them.
        axes = [labels._view(), RangeIndex._simple_new(range(end - first))]
        manager = BlockManager(blocks, axes, verify_integrity=False)
        return from_manager(manager, manager.axes)

    return make


@cache
def frame_maker() -> Callable[[Sequence[str], Sequence[Array]], Make]:
    """The quick way if this pandas has it, the public one otherwise."""
    return choose_maker(inner_maker)


def choose_maker(
    quick: Callable[[Sequence[str], Sequence[Array]], Make],
) -> Callable[[Sequence[str], Sequence[Array]], Make]:
    """``quick``, if it makes what :func:`public_maker` makes."""
    columns = [
        np.array([1, 2, 3]),
        np.array([0.5, 1.5, np.nan]),
        np.array(["a", None, b"c"], object),
        np.array([5, 6, 7], "M8[ns]"),
        np.array([5, 6, 7], "m8[ns]"),
        np.array([True, False, True]),
        np.array([4, 5, 6]),
    ]
    names = list("abcdefg")
    try:
        plain, made = public_maker(names, columns)(1, 3), quick(names, columns)(1, 3)
        pd.testing.assert_frame_equal(made, plain, check_exact=True, check_column_type="exact")
        for frame in (made, plain):
            frame.loc[0, "a"] = 9
            frame["h"] = frame["a"] + frame["g"]
            frame.index.name = "n"
        pd.testing.assert_frame_equal(made.sort_values("d"), plain.sort_values("d"))
    except Exception:
        return public_maker
    return quick
