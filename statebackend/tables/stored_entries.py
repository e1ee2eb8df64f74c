"""Entries of a store as they lie there: which state they are of, and their key groups anew."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np
from pyspark.sql.types import StructType

from statebackend.key_hashing import key_groups
from statebackend.schema.keys.key_column_decoding import decode_leading_columns
from statebackend.state.blocks import binary_array
from statebackend.state.expiry_index import BY_EXPIRY, MAP
from statebackend.state.timers import BY_KEY, BY_TIME

__all__ = ["is_of", "with_key_groups"]

_TIMERS: Final = (BY_TIME, BY_KEY)
_KIND_AT: Final = 12  # in a key of the index of what expires
_ENTRY_AT, _MAP_ENTRY_AT = 13, 17  # there: where the state's number stands
_KEY_AT, _TIMED_KEY_AT = 4, 12  # in an entry of a state, and in a timer by time


def is_of(key: bytes, states: Collection[bytes]) -> bool:
    """Whether an entry is a timer, or belongs to one of these states (their 2 bytes)."""
    found = key[2:4]
    if found == BY_EXPIRY:
        at = _expiring_at(key)
        found = key[at : at + 2]
    return found in states or found in _TIMERS


def with_key_groups(keys: list[bytes], schema: StructType, max_parallelism: int) -> list[bytes]:
    """The same keys in the key groups of another max_parallelism; values are not looked at.

    Raises:
        CorruptionError: they are no keys of this schema.
    """
    places = np.fromiter(map(_user_key_at, keys), np.int64, len(keys))
    columns, _ = decode_leading_columns(binary_array(keys), schema, places)
    groups = key_groups(columns, max_parallelism).astype(np.dtype(">u2")).tobytes()
    return [groups[2 * n : 2 * n + 2] + key[2:] for n, key in enumerate(keys)]


def _user_key_at(key: bytes) -> int:
    found = key[2:4]
    if found == BY_EXPIRY:
        return _expiring_at(key) + 2
    return _TIMED_KEY_AT if found == BY_TIME else _KEY_AT


def _expiring_at(key: bytes) -> int:
    return _MAP_ENTRY_AT if key[_KIND_AT : _KIND_AT + 1] == MAP else _ENTRY_AT
