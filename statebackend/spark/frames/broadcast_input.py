"""A frame whose rows go to every subtask, beside one whose rows go where their keys say."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from statebackend.errors import SchemaError
from statebackend.keygroups import key_group_range
from statebackend.operators.input.packing import GROUP
from statebackend.schema.ddl import quoted
from statebackend.spark.frames.key_hash_expression import key_group_expression

__all__ = ["check_rules", "with_rules"]


def check_rules(rules: DataFrame) -> None:
    """Refuse what cannot be the input that goes to every subtask.

    Raises:
        SchemaError: it is not streaming, or has no columns, or two of one name.
    """
    if not rules.isStreaming:
        raise SchemaError(
            "The frame of rules is not a streaming frame.",
            todo="Read it with spark.readStream; what never changes can be an attribute of the "
            "processor.",
        )
    names = rules.columns
    if not names or len(set(names)) != len(names):
        raise SchemaError(
            f"The frame of rules has the columns ({', '.join(names)}).",
            todo="Give it at least one column, and each a name of its own.",
        )


def with_rules(
    data: DataFrame,
    rules: DataFrame,
    *,
    keys: list[str],
    parallelism: int,
    max_parallelism: int,
) -> DataFrame:
    """Both as one frame, each row of ``rules`` once for every subtask.

    Its columns: those of ``data`` (``l0..``), of ``rules`` (``r0..``), ``n``, the number of a row
    of ``rules`` (null for one of ``data``), and where the row goes (see
    :mod:`statebackend.operators.input.packing`).

    The numbers are given before the rows are multiplied, and are the same in every subtask: they
    say in which order all subtasks take them.
    """
    group = key_group_expression([F.col(quoted(name)) for name in keys], max_parallelism)
    number = F.lit(None).cast("bigint")
    routed = data.select(
        *_columns(data.schema, "l"),
        *_nothing(rules.schema, "r"),
        number.alias("n"),
        group.alias(GROUP),
    )
    numbered = rules.select(
        *_columns(rules.schema, "r"), F.monotonically_increasing_id().alias("n")
    )
    # The first key group of each subtask's range.
    firsts = [key_group_range(i, parallelism, max_parallelism).start for i in range(parallelism)]
    multiplied = numbered.select(
        *_nothing(data.schema, "l"),
        *[F.col(f"r{i}") for i in range(len(rules.schema))],
        F.col("n"),
        F.explode(F.array(*[F.lit(first) for first in firsts])).alias(GROUP),
    )
    return routed.union(multiplied)


def _columns(schema: StructType, letter: str) -> list[Column]:
    names = enumerate(schema.names)
    return [F.col(quoted(name)).alias(f"{letter}{i}") for i, name in names]


def _nothing(schema: StructType, letter: str) -> list[Column]:
    types = enumerate(field.dataType for field in schema)
    return [F.lit(None).cast(dtype).alias(f"{letter}{i}") for i, dtype in types]
