"""What a user writes into ``aggregations=``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Aggregation",
    "approx_count_distinct",
    "count_distinct",
    "first",
    "last",
    "top_k",
]


@dataclass(frozen=True)
class Aggregation:
    """One aggregation, not yet checked against a schema.

    Attributes:
        function: its name.
        columns: what it reads.
        options: by name; those that the function has.
    """

    function: str
    columns: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


def first(column: str, *, by: str | None = None, ignore_nulls: bool = False) -> Aggregation:
    """The value that arrived first, or that of the smallest ``by``.

    Args:
        column: to take the value of; nulls count as values unless ``ignore_nulls``.
        by: the order; rows where it is null are left out. With it, rows can be
            aggregated before the shuffle; the result does not hang on the order of arrival if
            ``by`` has no ties. (Without it, of sessions that merge the one that starts earlier
            counts as having arrived earlier.)
    """
    return Aggregation("first", (column,), {"by": by, "ignore_nulls": ignore_nulls})


def last(column: str, *, by: str | None = None, ignore_nulls: bool = False) -> Aggregation:
    """The value that arrived last, or that of the largest ``by``: see `first`."""
    return Aggregation("last", (column,), {"by": by, "ignore_nulls": ignore_nulls})


def count_distinct(*columns: str) -> Aggregation:
    """How many different values (combinations of several columns) there are; exact.

    Rows with a null in one of the columns are left out. State holds every value.
    """
    return Aggregation("count_distinct", columns)


def approx_count_distinct(column: str, *, rsd: float = 0.02) -> Aggregation:
    """About how many different values there are, by a HyperLogLog sketch (Apache DataSketches).

    Needs the extra ``sketches``, on the driver and on every executor.

    Args:
        column: whose values to count; nulls are left out.
        rsd: relative standard deviation, 0.0008 to 0.09. A sketch takes at most
            ``1.1 / rsd**2`` bytes and a few (2 KiB for 0.02), fewer while it has seen little.
    """
    return Aggregation("approx_count_distinct", (column,), {"rsd": rsd})


def top_k(column: str, k: int) -> Aggregation:
    """The ``k`` most frequent values, exact: array<struct<value, count>>.

    Most frequent first, of equally frequent ones the smallest first; nulls are left out. State
    holds a count for every value.
    """
    return Aggregation("top_k", (column,), {"k": k})
