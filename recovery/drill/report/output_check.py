"""Whether a job's output is what its input must give; nothing here knows of Spark.

Without keys, rows are counted: each must be there as often as in the truth. With keys, only the
newest row of each key counts, which is what a job that puts out updates promises.
"""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from recovery.drill.report.drill_report import EXAMPLES_MAX, NOTHING_COMPARED, Verdict
from statebackend.errors import DrillError

__all__ = ["check", "comparable"]

Row = tuple[Any, ...]


def comparable(value: Any, kind: pa.DataType | None = None) -> Any:
    """A value as it can be counted: nested ones as tuples, times in UTC, every NaN the same.

    Args:
        kind: the column's type. With it, maps may be given as mappings or as pairs, and structs by
            name or by position.
    """
    if kind is not None and value is not None:
        if pa.types.is_map(kind):
            return _pairs(value, kind.key_type, kind.item_type)
        if pa.types.is_struct(kind):
            return _fields(value, kind)
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            return tuple(comparable(one, kind.value_type) for one in value)
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, datetime.datetime):
        return value if value.tzinfo is not None else value.replace(tzinfo=datetime.UTC)
    if isinstance(value, Mapping):
        return _pairs(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, list | tuple):
        return tuple(comparable(v) for v in value)
    if isinstance(value, set | frozenset):
        return tuple(sorted(comparable(v) for v in value))
    return value.item() if hasattr(value, "item") else value


def _pairs(value: Any, key: pa.DataType = None, item: pa.DataType = None) -> tuple[Any, ...]:
    """A mapping, or its pairs, in the order of the keys."""
    given = value.items() if isinstance(value, Mapping) else value
    pairs = [(comparable(k, key), comparable(v, item)) for k, v in given]
    try:
        return tuple(sorted(pairs, key=lambda pair: pair[0]))
    except TypeError:  # keys of more than one kind
        return tuple(sorted(pairs, key=repr))


def _fields(value: Any, kind: pa.StructType) -> Any:
    """A struct's values in the order of its fields; as it is if it has others."""
    fields = list(kind)
    if isinstance(value, Mapping):
        if set(value) != {field.name for field in fields}:
            return comparable(value)
        value = [value[field.name] for field in fields]
    if not isinstance(value, list | tuple) or len(value) != len(fields):
        return comparable(value)
    return tuple(comparable(v, field.type) for v, field in zip(value, fields, strict=True))


def check(
    truth: Iterable[Sequence[Any]],
    found: Iterable[Mapping[str, Any]],
    *,
    keys: Sequence[str] | None = None,
    failure: str = "",
    schema: pa.Schema | None = None,
) -> Verdict:
    """Compare a job's output with its truth.

    Args:
        truth: rows, their values in the order of the output's columns.
        found: the output, oldest row first.
        keys: columns; only the newest row of each key counts. None: all rows count.
        failure: why the job did not come to its end; then nothing is exact.
        schema: of the output: how its maps and structs are read. None: as Python's values are.

    Raises:
        DrillError: the truth's rows are not as wide as the output's, or a key is no column.
    """
    wanted = list(truth)
    rows = list(found)
    columns = list(rows[0]) if rows else []
    if rows and wanted and len(wanted[0]) != len(columns):
        raise DrillError(
            f"The truth has {len(wanted[0])} values in a row, and the output has the columns "
            f"{', '.join(columns)}.",
            todo="Give the truth as tuples in the order of the output's columns.",
        )
    kinds = [None if schema is None else schema.field(name).type for name in columns]
    right = [_row(row, kinds) for row in wanted]
    given = [_row(list(row.values()), kinds) for row in rows]
    lost: Counter[Row]
    if keys is None:
        lost, duplicated, wrong = _by_row(right, given)
        expected, seen = len(right), len(given)
    else:
        places = _places(keys, columns)
        truths, newest = _newest(right, places), _newest(given, places)
        expected, seen = len(truths), len(newest)
        lost = Counter(row for key, row in truths.items() if key not in newest)
        wrong = Counter(row for key, row in newest.items() if truths.get(key) != row)
        duplicated = Counter()
    counts = [sum(c.values()) for c in (lost, duplicated, wrong)]
    if not failure and not wanted and not rows:
        failure = NOTHING_COMPARED
    return Verdict(
        exact=not failure and not any(counts),
        expected=expected,
        found=seen,
        lost=counts[0],
        duplicated=counts[1],
        wrong=counts[2],
        examples=_examples(lost, duplicated, wrong),
        failure=failure,
    )


def _row(values: Sequence[Any], kinds: Sequence[pa.DataType | None]) -> Row:
    """A row as it can be counted; without output there are no kinds."""
    if len(kinds) != len(values):
        return tuple(map(comparable, values))
    return tuple(map(comparable, values, kinds))


def _by_row(wanted: list[Row], given: list[Row]) -> tuple[Counter[Row], Counter[Row], Counter[Row]]:
    truth, output = Counter(wanted), Counter(given)
    extra = output - truth
    duplicated = Counter({row: n for row, n in extra.items() if row in truth})
    wrong = Counter({row: n for row, n in extra.items() if row not in truth})
    return truth - output, duplicated, wrong


def _places(keys: Sequence[str], columns: list[str]) -> list[int]:
    if not columns:
        return []  # no output: nothing is looked up by these
    strange = [key for key in keys if key not in columns]
    if strange:
        raise DrillError(
            f"The output has no column {', '.join(strange)}, only {', '.join(columns)}.",
            todo="Name columns of the job's output in keys=.",
        )
    return [columns.index(key) for key in keys]


def _newest(rows: list[Row], places: list[int]) -> dict[Row, Row]:
    if not places:  # no output: every row of the truth is one that is lost
        return {row: row for row in rows}
    return {tuple(row[place] for place in places): row for row in rows}


def _examples(lost: Counter[Row], duplicated: Counter[Row], wrong: Counter[Row]) -> list[str]:
    kinds = {"lost": lost, "duplicated": duplicated, "wrong": wrong}
    each = max(EXAMPLES_MAX // max(1, sum(map(bool, kinds.values()))), 1)
    found = []
    for kind, rows in kinds.items():
        first = sorted(rows, key=repr)[:each]
        found += [f"{kind}: {_text(row)}" + _times(rows[row]) for row in first]
    return found[:EXAMPLES_MAX]


def _text(row: Row) -> str:
    return "(" + ", ".join(map(str, row)) + ")"


def _times(count: int) -> str:
    return f" {count} times" if count > 1 else ""
