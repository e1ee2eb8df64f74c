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

from recovery.drill.outcome import EXAMPLES_MAX, Verdict
from statebackend.errors import DrillError

__all__ = ["check", "comparable"]

Row = tuple[Any, ...]


def comparable(value: Any) -> Any:
    """A value as it can be counted: nested ones as tuples, times in UTC, every NaN the same."""
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, datetime.datetime):
        return value if value.tzinfo is not None else value.replace(tzinfo=datetime.UTC)
    if isinstance(value, Mapping):
        return tuple(sorted((str(k), comparable(v)) for k, v in value.items()))
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, list | tuple):
        return tuple(comparable(v) for v in value)
    if isinstance(value, set | frozenset):
        return tuple(sorted(comparable(v) for v in value))
    return value.item() if hasattr(value, "item") else value


def check(
    truth: Iterable[Sequence[Any]],
    found: Iterable[Mapping[str, Any]],
    *,
    keys: Sequence[str] | None = None,
    failure: str = "",
) -> Verdict:
    """Compare a job's output with its truth.

    Args:
        truth: rows, their values in the order of the output's columns.
        found: the output, oldest row first.
        keys: columns; only the newest row of each key counts. None: all rows count.
        failure: why the job did not come to its end; then nothing is exact.

    Raises:
        DrillError: the truth's rows are not as wide as the output's, or a key is no column.
    """
    wanted = [tuple(map(comparable, row)) for row in truth]
    rows = list(found)
    columns = list(rows[0]) if rows else []
    if rows and wanted and len(wanted[0]) != len(columns):
        raise DrillError(
            f"The truth has {len(wanted[0])} values in a row, and the output has the columns "
            f"{', '.join(columns)}.",
            todo="Give the truth as tuples in the order of the output's columns.",
        )
    given = [tuple(map(comparable, row.values())) for row in rows]
    lost: Counter[Row]
    if keys is None:
        lost, duplicated, wrong = _by_row(wanted, given)
        expected, seen = len(wanted), len(given)
    else:
        places = _places(keys, columns)
        truths, newest = _newest(wanted, places), _newest(given, places)
        expected, seen = len(truths), len(newest)
        lost = Counter(row for key, row in truths.items() if key not in newest)
        wrong = Counter(row for key, row in newest.items() if truths.get(key) != row)
        duplicated = Counter()
    counts = [sum(c.values()) for c in (lost, duplicated, wrong)]
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
