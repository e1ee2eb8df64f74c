"""A short cut for ``pd.DataFrame({"k": [key], "n": [n]})``, while a pandas processor runs.

Such a frame, one per key, is most of what a small processor costs: pandas takes some 40
microseconds to find out that a list with one int makes an int64 column. Here the same frame is made
in a sixth of it, if it is a dictionary of names with short lists (or tuples, or single values) of
plain values of one type. Everything else goes to pandas as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import pandas as pd

__all__ = ["quick_frames", "quick_manager"]

_ROWS_MAX: Final = 64  # beyond, pandas' own way costs little per row
_PLANS_MAX: Final = 256
_DTYPES: Final[dict[type, Any]] = {
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    bool: np.dtype(np.bool_),
    str: np.dtype(object),
    np.int64: np.dtype(np.int64),
    np.float64: np.dtype(np.float64),
    np.bool_: np.dtype(np.bool_),
}

Make = Callable[[dict[Any, Any]], Any]
"""From a dictionary to a pandas manager; None: not a case for it."""


@contextmanager
def quick_frames() -> Iterator[None]:
    """While it lasts, ``pandas.DataFrame`` takes the short cut where there is one.

    It changes the class: for a process that runs nothing but a processor, as Spark's workers do.
    Does nothing if this pandas is unknown to it, or within another one.
    """
    original = pd.DataFrame.__init__
    make = _checked()
    if make is None or getattr(original, "_statebackend", False):
        yield
        return
    frame_type, plain_init = pd.DataFrame, pd.core.generic.NDFrame.__init__

    @functools.wraps(original)
    def init(
        self: Any,
        data: Any = None,
        index: Any = None,
        columns: Any = None,
        dtype: Any = None,
        copy: Any = None,
    ) -> None:
        if (
            type(data) is dict
            and index is None
            and columns is None
            and dtype is None
            and copy is None
            and type(self) is frame_type
        ):
            manager = make(data)
            if manager is not None:
                plain_init(self, manager)
                return
        original(self, data, index, columns, dtype, copy)

    init._statebackend = True  # type: ignore[attr-defined]
    frame_type.__init__ = init
    try:
        yield
    finally:
        if frame_type.__init__ is init:
            frame_type.__init__ = original


def quick_manager() -> Make:
    """The maker, out of pandas' inner parts (2.2 and 2.3)."""
    try:
        from pandas._config import using_string_dtype as own_strings
    except ImportError:  # 2.2
        from pandas._config import using_pyarrow_string_dtype as own_strings
    from pandas.core.indexes.range import RangeIndex
    from pandas.core.internals.blocks import NumpyBlock
    from pandas.core.internals.managers import BlockManager

    plans: dict[tuple[Any, ...], Any] = {}

    def make(data: dict[Any, Any]) -> Any:
        if own_strings():  # by an option, which a processor may set
            return None
        taken = _columns(data)
        if taken is None:
            return None
        columns, kinds, rows = taken
        shape = (tuple(data), tuple(kinds))
        if shape not in plans:
            if len(plans) >= _PLANS_MAX:
                plans.clear()
            plans[shape] = _plan(*shape)
        plan = plans[shape]
        if plan is None:
            return None
        labels, parts = plan
        try:
            blocks = tuple(
                [
                    NumpyBlock(np.array([columns[i] for i in at], dtype), placement=places, ndim=2)
                    for dtype, at, places in parts
                ]
            )
        except OverflowError:  # no int64
            return None
        axes = [labels._view(), RangeIndex._simple_new(range(rows))]
        return BlockManager(blocks, axes, verify_integrity=False)

    return make


def _plan(names: tuple[Any, ...], kinds: tuple[type, ...]) -> Any:
    """Labels, and for each dtype positions and placement; None: not a case for it."""
    from pandas._libs.internals import BlockPlacement

    if any(type(name) is not str for name in names) or any(kind not in _DTYPES for kind in kinds):
        return None
    positions: dict[Any, list[int]] = {}
    for i, kind in enumerate(kinds):
        positions.setdefault(_DTYPES[kind], []).append(i)
    parts = [(dtype, at, BlockPlacement(at)) for dtype, at in positions.items()]
    return pd.Index(list(names), dtype=object), parts


def _columns(data: dict[Any, Any]) -> tuple[list[Any], list[type], int] | None:
    """Columns of one length, the type of each one's values, the length; None: not a case for it."""
    rows, singles = -1, False
    columns: list[Any] = []
    kinds = []
    for value in data.values():
        kind = type(value)
        if kind is list or kind is tuple:
            if rows < 0:
                rows = len(value)
                if not 0 < rows <= _ROWS_MAX:
                    return None
            elif len(value) != rows:
                return None
            kind = type(value[0])
            if rows > 1 and len(set(map(type, value))) > 1:
                return None
        else:
            singles = True
        columns.append(value)
        kinds.append(kind)
    if rows < 0:
        return None
    if singles:
        columns = [one if type(one) in (list, tuple) else [one] * rows for one in columns]
    return columns, kinds, rows


@functools.cache
def _checked() -> Make | None:
    """The maker, if it makes what pandas makes."""
    sample = {"a": ["x"], "b": [1], "c": 2.5, "d": (np.int64(3),), "e": True, "f": "y"}
    try:
        with pd.option_context("future.infer_string", False):
            return _compared(quick_manager(), sample)
    except Exception:
        return None


def _compared(make: Make, sample: dict[str, Any]) -> Make:
    manager = make(sample)
    made, plain = pd.DataFrame._from_mgr(manager, manager.axes), pd.DataFrame(sample)
    pd.testing.assert_frame_equal(made, plain, check_exact=True, check_column_type="exact")
    for frame in (made, plain):
        frame.loc[0, "b"] = 9
        frame["g"] = frame["b"] + frame["d"]
    pd.testing.assert_frame_equal(made, plain, check_exact=True)
    return make
