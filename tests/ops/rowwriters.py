"""Writers of rows, and schemas of one column."""

from __future__ import annotations

from typing import Any

from pyspark.sql import types as T

from statebackend.operators.rows.row_writer import RowWriter

INNER = T.StructType([T.StructField("a", T.LongType()), T.StructField("b", T.StringType())])


def schema_of(dtype: T.DataType, *, nullable: bool = True) -> T.StructType:
    return T.StructType([T.StructField("c", dtype, nullable)])


def writer(schema: T.StructType) -> RowWriter:
    return RowWriter(schema, lambda: "The processor of operator 'op'")


def same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and (left == right or (left != left and right != right))
