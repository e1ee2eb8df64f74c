"""From key columns to key group. Part of the format: no release may change a single result.

The hash is evaluated in two places that must agree bit for bit: in Spark's plan, where rows are
sent to subtasks (`statebackend.spark.frames.key_hash_expression`), and here, where state is
addressed. Three steps:

1. *code* (int32) is Spark SQL's `hash(*columns)`: Murmur3_x86_32, seed 42, chained: the result
   over one column is the seed for the next. A null leaves the seed as it is.

   ============================================ =============================================
   type                                         hashed as
   ============================================ =============================================
   boolean                                      int, 1 or 0
   byte, short, int, date (days since epoch)    int (one 32-bit word, length 4)
   long, timestamp, timestamp_ntz,              long (low word, then high word, length 8)
   day-time interval (microseconds),
   time (nanoseconds since midnight)
   float, double                                its IEEE bits as int, long; -0.0 as 0.0, and
                                                every NaN as 0x7fc00000, 0x7ff8000000000000
   decimal, precision up to 18                  long: the unscaled value
   decimal, precision above 18                  bytes: the unscaled value as the shortest
                                                big-endian two's complement
   string (UTF-8), binary                       bytes: little-endian words of four, then *each*
                                                byte left over as a sign-extended word of its
                                                own (not the reference tail), then the length
   struct                                       fold over its fields
   array                                        fold over its elements
   ============================================ =============================================

   The type counts, not only the value: an int and a long of the same value differ.

2. *mix* is `murmur_mix`: one more murmur round over the code, made non-negative, as Flink does.
3. *key group* is the mix modulo max parallelism.

Source of step 1: Spark's `Murmur3_x86_32` and `HashExpression`; of steps 2 and 3: Flink's
`MathUtils.murmurHash`. tests/golden/key_hash_vectors.json holds results made by Spark itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from statebackend.errors import UnsupportedTypeError, UsageError

__all__ = ["LONG_DIGITS", "SEED", "canonical_bits", "hash_columns", "key_groups", "murmur_mix"]

SEED = 42
"""The seed of Spark's `hash`."""

LONG_DIGITS = 18
"""Decimals up to this precision are a long to Spark."""

_C1, _C2, _ADD = 0xCC9E2D51, 0x1B873593, 0xE6546B64
_MASK = 0xFFFFFFFF
# Rows hashed at a time: the temporaries of a few numpy steps stay in the processor's cache.
_BLOCK = 16384
# Below so many rows with bytes left, a Python loop over one row's words beats numpy over rows.
_STRAGGLERS = 32

_FIXED = (
    pa.bool_(),
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
)

Words = NDArray[np.uint32]


def murmur_mix(codes: NDArray[np.int32]) -> NDArray[np.int32]:
    """Flink's murmur round over 32-bit codes, made non-negative.

    Args:
        codes: int32, any shape.

    Returns:
        int32 of the same shape, 0 to 2**31 - 1.
    """
    word = _step(np.zeros(codes.shape, np.uint32), _premix(codes.astype(np.int32).view(np.uint32)))
    signed = _finish(word, np.uint32(4)).view(np.int32)
    # The negation of the smallest integer is itself: that one becomes 0.
    return np.maximum(np.abs(signed), np.int32(0))


def hash_columns(columns: Sequence[pa.Array]) -> NDArray[np.int32]:
    """Spark's `hash(*columns)` of every row.

    Args:
        columns: arrays (or chunked arrays) of one length, of the types in the module's table;
            large, view and dictionary variants count as what they hold.

    Returns:
        int32, one code for each row.

    Raises:
        UnsupportedTypeError: a column's type cannot be a key (maps, for one).
        UsageError: no columns, or columns of different lengths.
    """
    arrays = [_whole(column) for column in columns]
    for array in arrays:
        _check_type(array.type)
    if not arrays:
        raise UsageError("A key needs at least one column.", todo="Name the key columns.")
    rows = len(arrays[0])
    if any(len(array) != rows for array in arrays):
        lengths = ", ".join(str(len(array)) for array in arrays)
        raise UsageError(
            f"Key columns have different lengths: {lengths}.",
            todo="Pass columns of one record batch.",
        )
    words = np.full(rows, SEED, np.uint32)
    for start in range(0, max(rows, 1), _BLOCK):
        block = words[start : start + _BLOCK]
        for array in arrays:
            block = _fold(array.slice(start, _BLOCK), block)
        words[start : start + _BLOCK] = block
    return words.view(np.int32)


def key_groups(columns: Sequence[pa.Array], max_parallelism: int) -> NDArray[np.uint16]:
    """The key group of every row: `murmur_mix(hash_columns(columns)) % max_parallelism`.

    Args:
        columns: as for `hash_columns`.
        max_parallelism: key groups of the job, 1 to 32768.

    Returns:
        uint16, one group for each row.

    Raises:
        UnsupportedTypeError, UsageError: as `hash_columns`.
    """
    mixed = murmur_mix(hash_columns(columns)).view(np.uint32)
    return (mixed % np.uint32(max_parallelism)).astype(np.uint16)


# --- murmur, over uint32 arrays that wrap ------------------------------------------------------


def _rotl(word: Words, bits: int) -> Words:
    high = word << np.uint32(bits)
    high |= word >> np.uint32(32 - bits)
    return high


def _premix(word: Words) -> Words:
    """What happens to a word of input before it meets the hash."""
    word = _rotl(word * np.uint32(_C1), 15)
    word *= np.uint32(_C2)
    return word


def _step(state: Words, premixed: Words) -> Words:
    state = _rotl(state ^ premixed, 13)
    state *= np.uint32(5)
    state += np.uint32(_ADD)
    return state


def _finish(state: Words, length: Words | np.uint32) -> Words:
    state = state ^ length
    state ^= state >> np.uint32(16)
    state *= np.uint32(0x85EBCA6B)
    state ^= state >> np.uint32(13)
    state *= np.uint32(0xC2B2AE35)
    state ^= state >> np.uint32(16)
    return state


def _hash_int(values: NDArray[Any], seed: Words) -> Words:
    word = values.astype(np.int32, copy=False).view(np.uint32)
    return _finish(_step(seed, _premix(word)), np.uint32(4))


def _hash_long(values: NDArray[Any], seed: Words) -> Words:
    wide = values.view(np.uint64)
    low = wide.astype(np.uint32)
    high = (wide >> np.uint64(32)).astype(np.uint32)
    return _finish(_step(_step(seed, _premix(low)), _premix(high)), np.uint32(8))


def _hash_bytes(
    data: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64], seed: Words
) -> Words:
    """Spark's `hashUnsafeBytes` of `data[start : start + length]`, row by row of the index."""
    state = seed.copy()
    words = lengths >> 2
    # Every byte offset as the little-endian word that begins there.
    word_at = np.ndarray((max(data.size - 3, 0),), "<u4", data, strides=(1,))
    step = 0
    active = np.flatnonzero(words)
    while active.size > _STRAGGLERS:
        word = _premix(word_at[starts[active] + 4 * step])
        state[active] = _step(state[active], word)
        step += 1
        active = active[words[active] > step]
    for row in active.tolist():
        begin = int(starts[row])
        span = data[begin + 4 * step : begin + 4 * int(words[row])]
        state[row] = _steps(int(state[row]), _premix(span.view("<u4")).tolist())
    rest = lengths & 3
    for extra in range(3):
        active = np.flatnonzero(rest > extra)
        if not active.size:
            break
        byte = data[starts[active] + 4 * words[active] + extra]
        signed = byte.view(np.int8).astype(np.int32).view(np.uint32)
        state[active] = _step(state[active], _premix(signed))
    return _finish(state, lengths.astype(np.uint32))


def _steps(state: int, premixed: list[int]) -> int:
    """`_step` for one long row: its words depend on each other, so no vector helps."""
    for word in premixed:
        state ^= word
        state = (((state << 13) | (state >> 19)) & _MASK) * 5 + _ADD & _MASK
    return state


# --- Arrow columns -----------------------------------------------------------------------------


def _whole(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _fold(array: pa.Array, seed: Words) -> Words:
    """Hash one column on top of `seed` (uint32, one for each row)."""
    if pt.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pt.is_struct(array.type):
        state = seed
        for index in range(array.type.num_fields):
            state = _fold(array.field(index), state)
    elif _is_list(array.type):
        state = _fold_list(array, seed)
    else:
        state = _fold_leaf(array, seed)
    if array.null_count:
        state = np.where(_valid(array), state, seed)
    return state


def _fold_list(array: pa.Array, seed: Words) -> Words:
    """Fold element by element: the rows' first elements, then their second, and so on."""
    if not pt.is_large_list(array.type):
        array = array.cast(pa.large_list(array.type.value_type))
    offsets = array.offsets.to_numpy()
    starts, lengths = offsets[:-1], np.diff(offsets)
    elements, state = array.values, seed.copy()
    index, active = 0, np.flatnonzero(lengths)
    while active.size:
        taken = elements.take(pa.array(starts[active] + index))
        state[active] = _fold(taken, state[active])
        index += 1
        active = active[lengths[active] > index]
    return state


def _fold_leaf(array: pa.Array, seed: Words) -> Words:
    kind = array.type
    if pt.is_boolean(kind):
        return _hash_int(_values(array.cast(pa.int8()), np.dtype(np.int8)), seed)
    if kind in (pa.int8(), pa.int16(), pa.int32()):
        return _hash_int(_values(array, np.dtype(kind.to_pandas_dtype())), seed)
    if pt.is_date(kind):
        return _hash_int(_values(array.cast(pa.date32()), np.dtype(np.int32)), seed)
    if pt.is_int64(kind):
        return _hash_long(_values(array, np.dtype(np.int64)), seed)
    if pt.is_timestamp(kind):
        micros = array.cast(pa.timestamp("us", kind.tz))
        return _hash_long(_values(micros, np.dtype(np.int64)), seed)
    if pt.is_duration(kind):
        return _hash_long(_values(array.cast(pa.duration("us")), np.dtype(np.int64)), seed)
    if pt.is_time64(kind):
        return _hash_long(_values(array.cast(pa.time64("ns")), np.dtype(np.int64)), seed)
    if pt.is_float32(kind):
        bits = canonical_bits(_values(array, np.dtype(np.uint32)))
        return _hash_int(bits.view(np.int32), seed)
    if pt.is_float64(kind):
        return _hash_long(canonical_bits(_values(array, np.dtype(np.uint64))), seed)
    if pt.is_decimal128(kind):
        return _fold_decimal(array, seed)
    if _is_bytes(kind):
        return _fold_bytes(array, seed)
    raise _unsupported(kind)


def canonical_bits(bits: NDArray[Any]) -> NDArray[Any]:
    """IEEE bits (uint32 or uint64) with one zero, +0.0, and one NaN, the positive quiet one.

    On bits, as arithmetic on a signalling NaN makes numpy warn.
    """
    kind = bits.dtype.type
    infinity, quiet = (0x7F800000, 0x7FC00000) if kind is np.uint32 else (0x7FF << 52, 0xFFF << 51)
    size = bits << kind(1)
    one: NDArray[Any] = np.where(size > kind(2 * infinity), kind(quiet), bits)
    one[size == 0] = 0
    return one


def _fold_decimal(array: pa.Array, seed: Words) -> Words:
    rows = len(array)
    halves = np.frombuffer(array.buffers()[1], "<i8")[2 * array.offset :][: 2 * rows]
    if array.type.precision <= LONG_DIGITS:
        return _hash_long(np.ascontiguousarray(halves[::2]), seed)
    digits = np.ascontiguousarray(halves.view(np.uint8).reshape(rows, 16)[:, ::-1])
    sign = digits[:, 0] >> 7
    fill = sign * np.uint8(255)
    telling = digits != fill[:, None]
    first: NDArray[np.int64] = np.where(telling.any(axis=1), telling.argmax(axis=1), 15)
    # The first telling byte must also carry the sign, else one byte of fill stays in front.
    row: NDArray[np.int64] = np.arange(rows, dtype=np.int64)
    first -= (digits[row, first] >> 7) != sign
    return _hash_bytes(digits.reshape(-1), row * 16 + first, 16 - first, seed)


def _fold_bytes(array: pa.Array, seed: Words) -> Words:
    kind = array.type
    if pt.is_string_view(kind) or pt.is_binary_view(kind) or pt.is_fixed_size_binary(kind):
        array = array.cast(pa.large_binary())
    large = pt.is_large_string(array.type) or pt.is_large_binary(array.type)
    _, offset_buffer, data_buffer = array.buffers()
    raw: NDArray[Any] = np.frombuffer(offset_buffer, np.int64 if large else np.int32)
    offsets = raw[array.offset : array.offset + len(array) + 1].astype(np.int64, copy=False)
    data = np.frombuffer(data_buffer or b"", np.uint8)
    return _hash_bytes(data, offsets[:-1], np.diff(offsets), seed)


def _values(array: pa.Array, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The values of a fixed-width array without a copy; arbitrary where null."""
    values = np.frombuffer(array.buffers()[1], dtype)
    return values[array.offset : array.offset + len(array)]


def _valid(array: pa.Array) -> NDArray[np.bool_]:
    valid: NDArray[np.bool_] = pc.is_valid(array).to_numpy(zero_copy_only=False)
    return valid


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pt.is_list(kind)
        or pt.is_large_list(kind)
        or pt.is_fixed_size_list(kind)
        or pt.is_list_view(kind)
        or pt.is_large_list_view(kind)
    )


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pt.is_string(kind)
        or pt.is_binary(kind)
        or pt.is_large_string(kind)
        or pt.is_large_binary(kind)
        or pt.is_string_view(kind)
        or pt.is_binary_view(kind)
        or pt.is_fixed_size_binary(kind)
    )


def _check_type(kind: pa.DataType) -> None:
    """Refuse what cannot be hashed, whether or not there are rows."""
    if pt.is_dictionary(kind) or _is_list(kind):
        _check_type(kind.value_type)
    elif pt.is_struct(kind):
        for index in range(kind.num_fields):
            _check_type(kind.field(index).type)
    elif not (kind in _FIXED or _is_bytes(kind) or pt.is_decimal128(kind) or _is_time(kind)):
        raise _unsupported(kind)


def _is_time(kind: pa.DataType) -> bool:
    return bool(
        pt.is_date(kind) or pt.is_timestamp(kind) or pt.is_duration(kind) or pt.is_time64(kind)
    )


def _unsupported(kind: pa.DataType) -> UnsupportedTypeError:
    return UnsupportedTypeError(
        f"A column of Arrow type {kind} cannot be part of a key.",
        todo="Use booleans, signed integers, floats, strings, binaries, dates, times, timestamps, "
        "decimals up to 38 digits, or structs and arrays of these.",
    )
