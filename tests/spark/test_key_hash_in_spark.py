"""Spark's expression and Python's function put every key into the same group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from statebackend.key_hashing import hash_columns, key_groups
from statebackend.spark.frames.key_hash_expression import key_group_expression, surrogates
from tests.schema.key_vectors import load

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MOST = 32768


def _groups(frame: DataFrame, keys: list[str], most: int = MOST) -> list[tuple[int, int]]:
    from pyspark.sql import functions as F

    columns = [F.col(key) for key in keys]
    expression = key_group_expression(columns, most)
    rows = frame.select(F.hash(*columns).alias("code"), expression.alias("group")).collect()
    return [(row["code"], row["group"]) for row in rows]


@pytest.fixture(scope="module")
def random_keys() -> pa.Table:
    """Three thousand composite keys, a tenth of each column null."""
    draw, rows = np.random.default_rng(2026), 3000
    letters = np.array(list("abcxyzäßé日😀 "))

    def column(values: list[object], kind: pa.DataType) -> pa.Array:
        null = draw.random(rows) < 0.1
        return pa.array([None if n else v for n, v in zip(null, values, strict=True)], kind)

    texts = ["".join(draw.choice(letters, n)) for n in draw.integers(0, 14, rows)]
    longs = draw.integers(-(2**63), 2**63 - 1, rows).tolist()
    inner = pa.StructArray.from_arrays(
        [column(draw.normal(size=rows).tolist(), pa.float64()), column(texts[::-1], pa.string())],
        names=["f0", "f1"],
    )
    ends = np.cumsum(draw.integers(0, 4, rows - 1))
    offsets = pa.array(np.concatenate([[0, 0], ends]), pa.int32())
    elements = pa.array(draw.integers(-5, 5, int(ends[-1])), pa.int32())
    return pa.table(
        {
            "n": column(longs, pa.int64()),
            "s": column(list(texts), pa.string()),
            "t": inner,
            "l": pa.ListArray.from_arrays(offsets, elements),
            "i": column(draw.integers(-(2**31), 2**31, rows).tolist(), pa.int32()),
        }
    )


def test_the_vectors_are_what_this_spark_computes(spark: SparkSession) -> None:
    for case in load():
        frame = spark.createDataFrame(case.table(), case.ddl)
        expected = list(zip(case.codes, case.groups[str(MOST)], strict=True))
        assert _groups(frame, frame.columns) == expected, case.ddl


@pytest.mark.parametrize("ansi", ["true", "false"])
def test_random_composite_keys_agree_in_either_ansi_mode(
    spark: SparkSession, random_keys: pa.Table, ansi: str
) -> None:
    before = spark.conf.get("spark.sql.ansi.enabled")
    spark.conf.set("spark.sql.ansi.enabled", ansi)
    try:
        frame = spark.createDataFrame(random_keys)
        for keys in (["n"], ["s"], ["n", "s"], ["t", "l"], ["i", "s", "t", "l", "n"]):
            columns = [random_keys.column(key) for key in keys]
            codes = hash_columns(columns).tolist()
            groups = key_groups(columns, MOST).tolist()
            assert _groups(frame, keys) == list(zip(codes, groups, strict=True)), keys
    finally:
        spark.conf.set("spark.sql.ansi.enabled", str(before))


@pytest.mark.parametrize("most", [1, 10, 128])
def test_the_expression_takes_any_max_parallelism(
    spark: SparkSession, random_keys: pa.Table, most: int
) -> None:
    frame = spark.createDataFrame(random_keys.select(["n"]))
    got = [group for _, group in _groups(frame, ["n"], most)]
    assert got == key_groups([random_keys.column("n")], most).tolist()


def test_the_expression_is_an_int_and_short(spark: SparkSession) -> None:
    from pyspark.sql import functions as F

    group = key_group_expression([F.col("id")], 128).alias("g")
    frame = spark.range(1).select(group)
    assert frame.schema["g"].dataType.simpleString() == "int"
    # Spark prints it in every plan, and behind the error of a failed query.
    assert len(str(group)) < 200


@pytest.mark.parametrize("parallelism", [1, 2, 3, 4, 7, 200])
def test_surrogates_are_sent_where_they_should_be(spark: SparkSession, parallelism: int) -> None:
    from pyspark.sql import functions as F

    values, barriers = surrogates(parallelism)
    assert len({*values, *barriers}) == 2 * parallelism
    rows = [(v, i) for some in (values, barriers) for i, v in enumerate(some)]
    frame = spark.createDataFrame(rows, "v int, wanted int")
    target = F.pmod(F.hash("v"), F.lit(parallelism))
    assert frame.where(target != F.col("wanted")).count() == 0
    placed = frame.repartition(parallelism, "v").where(F.spark_partition_id() != F.col("wanted"))
    assert placed.count() == 0
