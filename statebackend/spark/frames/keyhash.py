"""The hash from key to key group as a Spark expression, and keys that name subtasks.

`key_group_expression` is the twin of `statebackend.hashing.key_groups`, in public PySpark
functions only; the two must agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F

from statebackend.errors import UsageError
from statebackend.hashing import hash_columns
from statebackend.keygroups import check_parallelism

__all__ = ["key_group_expression", "surrogates"]

_MASK = 0xFFFFFFFF


def key_group_expression(keys: Sequence[Column], max_parallelism: int) -> Column:
    """The key group of a row, as an int column (0 to `max_parallelism` - 1; no row's is null).

    The murmur round runs on bigints that hold unsigned 32-bit words, and no step of it leaves the
    range of a bigint, so that ANSI mode has nothing to object to. Expressions are trees: whatever
    names a word twice doubles all that lies beneath it. So a rotation is one division (see
    `_rotl`), and only the three xor-shifts double.

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
    word = F.hash(*keys).cast("bigint").bitwiseAND(F.lit(_MASK))
    word = _rotl(_times(word, 0xCC9E2D51), 15)
    word = _rotl(_times(word, 0x1B873593), 13)
    word = (word * F.lit(5) + F.lit(0xE6546B64)).bitwiseAND(F.lit(_MASK))
    word = _xor_shift(word.bitwiseXOR(F.lit(4).cast("bigint")), 16)
    word = _xor_shift(_times(word, 0x85EBCA6B), 13)
    word = _xor_shift(_times(word, 0xC2B2AE35), 16)
    # As signed, then its absolute value; the mask turns that of the smallest integer into 0.
    signed = (word + F.lit(1 << 31)).bitwiseAND(F.lit(_MASK)) - F.lit(1 << 31)
    mixed = F.abs(signed).bitwiseAND(F.lit(0x7FFFFFFF).cast("bigint"))
    return (mixed % F.lit(max_parallelism)).cast("int")


def _times(word: Column, factor: int) -> Column:
    """`word * factor` modulo 2**32."""
    # As a signed factor it is below 2**31 in size, so the product stays within 63 bits.
    signed = factor - (1 << 32) if factor >> 31 else factor
    return (word * F.lit(signed).cast("bigint")).bitwiseAND(F.lit(_MASK))


def _rotl(word: Column, bits: int) -> Column:
    """Rotate left, naming `word` once.

    Shifted left, the word is `high * 2**32 + low`, and the rotation is `high + low`: the same
    modulo 2**32 - 1. That modulus cannot tell 0 from all ones; taking one off before and putting
    it back can, as the remainder keeps the dividend's sign (-1 stays -1).
    """
    shifted = word * F.lit(1 << bits)
    return (shifted - F.lit(1)) % F.lit(_MASK) + F.lit(1)


def _xor_shift(word: Column, bits: int) -> Column:
    return word.bitwiseXOR(F.shiftrightunsigned(word, bits))


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
        if np.bincount(bucket, minlength=parallelism).min() >= 2:
            break
        tried *= 2
    order = np.argsort(bucket, kind="stable")
    first = np.searchsorted(bucket[order], np.arange(parallelism))
    return order[first].tolist(), order[first + 1].tolist()
