"""Where we differ from Spark's own engine, and docs/reference/compatibility.md says so.

If one of these fails because Spark does otherwise by now, the table's row is out of date.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.local.conformance import Both, Case
from tests.spark.local.conforming_time import Different

if TYPE_CHECKING:
    from tests.spark.local.world import World


@pytest.fixture
def both(world: World) -> Both:
    return Both(world)


def _of(key: str, batches: list[list[tuple[Any, ...]]]) -> list[list[tuple[Any, ...]]]:
    """Number and text of one key's rows, by batch."""
    return [[row[1:] for row in rows if row[0] == key] for rows in batches]


def test_the_table_of_differences_says_what_both_engines_do(both: Both) -> None:
    def row(key: str, o: float | str, number: int, at_s: float) -> dict[str, Any]:
        return {"k": key, "o": o, "id": number, "at": f"1970-01-01T00:00:{at_s:04.1f}Z"}

    case = Case(
        "k string, o double, id bigint, at timestamp",
        Different(),
        keys=("k", "o"),
        mode="event",
        delay="0 seconds",
    )
    first = [row("zero", -0.0, 1, 4), row("lazy", 1.0, 1, 4), row("emptied", 1.0, 1, 4)]
    first.append(row("old", 1.0, 7, 0))
    both.run(case, [first, [row("emptied", 1.0, 2, 5)]])
    again = [row("zero", 0.0, 2, 6), row("timers", 1.0, 3, 6), row("late", 1.0, 4, 4.5)]
    both.run(case, [[*again, row("nan", "NaN", 5, 6), row("nan", "NaN", 6, 6)]])
    sparks, ours = both.sparks.filled(), both.ours.filled()
    assert len(sparks) == len(ours) == 3

    # "a timer that another timer's handler deletes in the same batch fires all the same"
    assert _of("timers", sparks)[2] == [(1, "list(3)"), (1000, "timer"), (2000, "timer")]
    assert _of("timers", ours)[2] == [(1, "list(3)"), (1000, "timer")]
    # "a NaN key is a key of its own in each row"
    assert _of("nan", sparks)[2] == [(1, "list(5)"), (2, "list(6)")]
    assert _of("nan", ours)[2] == [(2, "list(5, 6)")]
    # "a key of -0.0 is grouped with 0.0, but has a state of its own"
    assert _of("zero", sparks) == [[(1, "list(1)")], [], [(1, "list(2)")]]
    assert _of("zero", ours) == [[(1, "list(1)")], [], [(2, "list(2)")]]
    # No difference: a batch without data runs when the watermark has moved, and drops are by it.
    assert _of("late", sparks)[2] == _of("late", ours)[2] == []
    # Nor here: rows at or before 1970-01-01 are late from the first batch on.
    assert _of("old", sparks)[0] == _of("old", ours)[0] == []
    # "an iterator of a list state shows what was cleared meanwhile as gone"
    assert _of("lazy", sparks)[0] == [(0, "list()")]
    assert _of("lazy", ours)[0] == [(0, "list(tuple(1))")]
    # "a state deleted and declared in one init is emptied in every batch"
    assert _of("emptied", sparks)[:2] == [[(1, "")], [(1, "")]]
    assert _of("emptied", ours)[:2] == [[(1, "")], [(2, "")]]
