"""The hash from key to key group as a Spark expression, and keys that name subtasks.

`key_group_expression` is the twin of `statebackend.key_hashing.key_groups`, in public PySpark
functions only; the two must agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F

from statebackend.errors import UsageError
from statebackend.key_hashing import hash_columns
from statebackend.keygroups import check_parallelism

__all__ = ["key_group_expression", "surrogates"]

# The one int whose hash with Spark's seed is 0. What is hashed behind it is hashed with the seed 0.
_TO_SEED_0: Final = -1693959553


def key_group_expression(keys: Sequence[Column], max_parallelism: int) -> Column:
    """The key group of a row, as an int column (0 to `max_parallelism` - 1; no row's is null).

    The second round is Spark's hash of one int with the seed 0. Public functions know the seed 42
    only. But the hash of several columns is a chain, in which each hash is the seed of the next
    one: behind `_TO_SEED_0` that is 0. Written out in arithmetic the same is as long as a page, in
    each plan that Spark prints.

    Args:
        keys: the key columns, in the order in which they are hashed.
        max_parallelism: key groups of the job.

    Raises:
        ParallelismError: `max_parallelism` is outside 1 to 32768.
        UsageError: no keys.
    """
    check_parallelism(1, max_parallelism)
    if not keys:
        raise UsageError("A key needs at least one column.", todo="Name the key columns.")
    word = F.hash(F.lit(_TO_SEED_0), F.hash(*keys))
    # As a bigint the smallest int has an absolute value, and the mask turns that into 0.
    mixed = F.abs(word.cast("bigint")).bitwiseAND(F.lit(0x7FFFFFFF).cast("bigint"))
    return (mixed % F.lit(max_parallelism)).cast("int")


def surrogates(parallelism: int) -> tuple[list[int], list[int]]:
    """Ints that Spark's hash partitioning sends to a wanted partition.

    Args:
        parallelism: subtasks, 1 to 32768.

    Returns:
        `(values, barriers)`, each of length `parallelism`: for both,
        `pmod(hash(CAST(x[i] AS INT)), parallelism) == i`, and all 2 * `parallelism` ints are
        distinct. They are the two smallest such ints from 0 on, so every call finds the same.

    Raises:
        ParallelismError: `parallelism` is outside 1 to 32768.
    """
    check_parallelism(parallelism, parallelism)
    # Two coupons of every kind: p * (ln p + ln ln p) draws are expected; double until enough.
    tried = parallelism * (4 + 2 * parallelism.bit_length()) // 2 + 16
    while True:
        candidates = np.arange(tried, dtype=np.int32)
        # numpy's remainder takes the divisor's sign, as pmod does.
        bucket = hash_columns([pa.array(candidates)]) % np.int32(parallelism)
        if np.min(np.bincount(bucket, minlength=parallelism)) >= 2:
            break
        tried *= 2
    order = np.argsort(bucket, kind="stable")
    first = np.searchsorted(bucket[order], np.arange(parallelism))
    return order[first].tolist(), order[first + 1].tolist()
