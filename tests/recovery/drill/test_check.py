"""The check of a drill finds what is lost, twice there, or wrong; and nothing else."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.drill.jobs.batch_sink import rows_in, schema_of
from recovery.drill.report.drill_report import NOTHING_COMPARED
from recovery.drill.report.output_check import check
from statebackend.errors import DrillError

ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=20)


def output(rows: Iterable[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [{"k": row[0], "n": row[1]} for row in rows]


@given(ROWS, st.randoms(use_true_random=False))
def test_the_same_rows_in_any_order_are_exact(rows: list[tuple[int, int]], random: Any) -> None:
    shuffled = random.sample(rows, len(rows))
    verdict = check(rows, output(shuffled))
    assert verdict.exact == bool(rows)
    assert (verdict.expected, verdict.found) == (len(rows), len(rows))


@given(ROWS, ROWS)
def test_every_difference_is_counted_once(
    truth: list[tuple[int, int]], found: list[tuple[int, int]]
) -> None:
    verdict = check(truth, output(found))
    assert verdict.expected - verdict.lost + verdict.duplicated + verdict.wrong == verdict.found
    assert verdict.exact == (sorted(truth) == sorted(found) != [])
    assert bool(verdict.examples) == (sorted(truth) != sorted(found))
    assert verdict.wrong == sum(row not in truth for row in found)


def test_lost_duplicated_and_wrong_rows_are_told_apart_with_examples() -> None:
    verdict = check([(1, 1), (2, 2), (3, 3)], output([(1, 1), (1, 1), (1, 1), (2, 9)]))
    assert (verdict.lost, verdict.duplicated, verdict.wrong) == (2, 2, 1)
    assert "duplicated: (1, 1) 2 times" in verdict.examples
    assert "wrong: (2, 9)" in verdict.examples
    assert "lost: (3, 3)" in verdict.examples


def test_of_updates_only_the_newest_of_each_key_counts() -> None:
    updates = [(1, 1), (2, 1), (1, 2), (1, 3)]
    assert check([(1, 3), (2, 1)], output(updates), keys=["k"]).exact
    verdict = check([(1, 4), (2, 1), (3, 1)], output(updates), keys=["k"])
    assert (verdict.expected, verdict.found) == (3, 2)
    assert (verdict.lost, verdict.duplicated, verdict.wrong) == (1, 0, 1)
    assert not check([(1, 3)], output(updates), keys=["k"]).exact, "key 2 is in no truth"


def test_no_output_at_all_is_everything_lost() -> None:
    for keys in (None, ["k"]):
        verdict = check([(1, 1), (2, 2)], [], keys=keys)
        assert (verdict.exact, verdict.lost) == (False, 2)


def test_nothing_and_nothing_are_not_taken_for_exact() -> None:
    for keys in (None, ["k"]):
        verdict = check([], [], keys=keys)
        assert (verdict.exact, verdict.failure) == (False, NOTHING_COMPARED)
    assert check([], [], failure="it hung").failure == "it hung"


def test_a_job_that_did_not_end_is_not_exact_whatever_its_rows_are() -> None:
    verdict = check([(1, 1)], output([(1, 1)]), failure="it hung")
    assert (verdict.exact, verdict.failure, verdict.lost) == (False, "it hung", 0)


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (float("nan"), 0.0),
        (datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), datetime.datetime(2026, 1, 2)),
        (Decimal("1.10"), Decimal("1.11")),
        ([{"a": [2, None]}, None], [{"a": [3, None]}, None]),
        (b"\x00", b"\x01"),
        (None, 0),
    ],
)
def test_values_of_every_kind_are_compared(tmp_path: Path, value: Any, other: Any) -> None:
    pq.write_table(pa.table({"k": [1], "v": [value]}), tmp_path / "0000000000.parquet")
    found = [row for _, row in rows_in(tmp_path, last=0)]
    assert check([(1, value)], found).exact
    assert check([(1, other)], found).wrong == 1


NESTED = pa.struct([("a", pa.int64()), ("m", pa.map_(pa.int64(), pa.string()))])


@pytest.mark.parametrize(
    ("kind", "stored", "truths", "others"),
    [
        (
            pa.map_(pa.int64(), pa.float64()),
            [(10, 1.0), (9, None)],
            [{9: None, 10: 1.0}, [(9, None), (10, 1.0)]],
            [{9: None, 10: 2.0}, {"9": None, "10": 1.0}, {10: 1.0}],
        ),
        (
            pa.struct([("b", pa.int64()), ("a", pa.string())]),
            {"b": 1, "a": "x"},
            [(1, "x"), {"a": "x", "b": 1}],
            [("x", 1), {"a": "x", "c": 1}, (1,), None],
        ),
        (
            pa.list_(NESTED),
            [{"a": 1, "m": [(2, "y"), (1, "x")]}, None],
            [[(1, {1: "x", 2: "y"}), None], ({"a": 1, "m": {2: "y", 1: "x"}}, None)],
            [[(1, {1: "x", 2: "z"}), None], [(1, {1: "x", 2: "y"})]],
        ),
    ],
    ids=["map", "struct", "nested"],
)
def test_maps_and_structs_are_compared_as_the_output_s_types_say(
    tmp_path: Path, kind: pa.DataType, stored: Any, truths: list[Any], others: list[Any]
) -> None:
    table = pa.table({"k": pa.array([1]), "v": pa.array([stored], kind)})
    pq.write_table(table, tmp_path / "0000000000.parquet")
    found = [row for _, row in rows_in(tmp_path, last=0)]
    schema = schema_of(tmp_path)
    assert [check([(1, v)], found, schema=schema).exact for v in truths] == [True] * len(truths)
    assert [check([(1, v)], found, schema=schema).wrong for v in others] == [1] * len(others)


def test_output_of_a_batch_that_spark_did_not_commit_does_not_count(tmp_path: Path) -> None:
    for batch in range(3):
        pq.write_table(pa.table({"k": [batch]}), tmp_path / f"{batch:010}.parquet")
    pq.write_table(pa.table({"k": [9]}), tmp_path / ".0000000001.123")  # of a killed driver
    assert [row["k"] for _, row in rows_in(tmp_path, last=1)] == [0, 1]


def test_a_truth_or_a_key_that_does_not_fit_is_refused() -> None:
    with pytest.raises(DrillError, match="3 values in a row"):
        check([(1, 1, 1)], output([(1, 1)]))
    with pytest.raises(DrillError, match="no column user"):
        check([(1, 1)], output([(1, 1)]), keys=["user"])
