"""How much is measured: the sizes of the issue, and small ones that show the harness to work."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = ["FULL", "QUICK", "Sizes"]


@dataclass(frozen=True)
class Sizes:
    """Counts, not durations. ``partitions``: one configuration of the comparison each.

    ``growth_keys_per_row``: keys of `growth`, as multiples of ``aggregate_rows``. ``rmw_keys``,
    ``scan_keys``: of a subtask, one case each.

    ``map_keys``: of the work with maps, whose state has 100 entries for each. ``pandas_rows``: keys
    and rows of the work in pandas. ``pandas_spark_batches``: its warm and counted batches on
    Spark's side, which takes a minute for 100,000 rows. ``quick_side_batches``: warm and counted
    batches of the other sides: these take a tenth of the time, and a JVM is warm after so many
    seconds, not after so many batches. ``aggregate_rows``: of a batch of an aggregate;
    ``aggregate_batches``, ``growth_batches``: its warm and counted batches on all sides, which take
    seconds on each; the warm ones bring all keys.
    """

    name: str
    keys: int
    rows: int
    warm_batches: int
    counted_batches: int
    rounds: int
    map_keys: int
    pandas_rows: int
    pandas_spark_batches: tuple[int, int]
    quick_side_batches: tuple[int, int]
    aggregate_rows: int
    aggregate_batches: tuple[int, int]
    growth_batches: tuple[int, int]
    growth_keys_per_row: tuple[float, ...]
    rmw_keys: tuple[int, ...]
    scan_keys: tuple[int, ...]
    partitions: tuple[int, ...]
    changed_keys: int
    empty_warm_batches: int
    empty_counted_batches: int
    empty_rounds: int
    repeats: int

    def with_rounds(self, rounds: int | None) -> Sizes:
        """The same with another number of rounds, where one is given."""
        return self if rounds is None else replace(self, rounds=rounds, empty_rounds=rounds)

    def to_json(self) -> dict[str, Any]:
        """As kept in the results."""
        return asdict(self)


FULL = Sizes(
    name="full",
    keys=100_000,
    rows=100_000,
    warm_batches=4,
    counted_batches=6,
    rounds=3,
    map_keys=10_000,
    pandas_rows=100_000,
    pandas_spark_batches=(1, 1),
    quick_side_batches=(30, 15),
    aggregate_rows=1_000_000,
    aggregate_batches=(24, 12),
    growth_batches=(16, 8),
    growth_keys_per_row=(0.01, 0.1, 1.0, 10.0),
    rmw_keys=(100_000, 1_000_000),
    scan_keys=(100_000, 1_000_000, 5_000_000),
    partitions=(2, 4),
    changed_keys=50_000,
    empty_warm_batches=8,
    empty_counted_batches=30,
    empty_rounds=3,
    repeats=15,
)
QUICK = Sizes(
    name="quick",
    keys=10_000,
    rows=10_000,
    warm_batches=1,
    counted_batches=2,
    rounds=1,
    map_keys=500,
    pandas_rows=3_000,
    pandas_spark_batches=(1, 1),
    quick_side_batches=(1, 2),
    aggregate_rows=100_000,
    aggregate_batches=(4, 3),
    growth_batches=(11, 3),
    growth_keys_per_row=(0.01, 0.1, 1.0, 10.0),
    rmw_keys=(10_000, 50_000),
    scan_keys=(20_000,),
    partitions=(2,),
    changed_keys=5_000,
    empty_warm_batches=3,
    empty_counted_batches=10,
    empty_rounds=1,
    repeats=5,
)
