"""What travels in a channel, and what it costs of the channel's credit."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from snapshot.barriers.barrier import Barrier, Cancel, EndOfInput, Event, Idle, Watermark
from statebackend.errors import SettingError
from statebackend.state.binary_columns import take

__all__ = [
    "CAPACITY_MIN_BYTES",
    "ELEMENT_BYTES",
    "FREE_EVENTS_MAX",
    "Element",
    "check_capacity",
    "compact",
    "cost_of",
    "cost_of_bytes",
    "row_bytes_max",
]

Element: TypeAlias = pa.RecordBatch | Event
"""Rows, or an event between them."""

ELEMENT_BYTES: Final = 512
"""What an element costs beside its rows: so a bound in bytes is one in elements too."""

CAPACITY_MIN_BYTES: Final = 16 * ELEMENT_BYTES
"""The least capacity of a channel."""

FREE_EVENTS_MAX: Final = 256
"""Events that cost nothing, waiting in one channel. They come by the checkpoint, not by the row."""

# Rows that keep more alive than so many times themselves are copied.
_SLACK: Final = 2


def check_capacity(capacity_bytes: int) -> int:
    """The capacity of a channel, in bytes.

    Raises:
        SettingError: too small for anything to get through.
    """
    if capacity_bytes < CAPACITY_MIN_BYTES:
        raise SettingError(
            f"A channel of {capacity_bytes} bytes is too small.",
            todo=f"Give a capacity of {CAPACITY_MIN_BYTES} bytes or more.",
        )
    return capacity_bytes


def cost_of(element: Element, capacity_bytes: int) -> int:
    """Bytes of credit that `element` takes of a channel of `capacity_bytes`.

    Barriers, cancellations and ends take none: they must get through where rows cannot. Rows take
    at most half the capacity, so that a row of any size can be sent, although into a channel that
    is about empty.
    """
    if isinstance(element, Barrier | Cancel | EndOfInput):
        return 0
    if isinstance(element, Watermark | Idle):
        return ELEMENT_BYTES
    return cost_of_bytes(element.nbytes, capacity_bytes)


def cost_of_bytes(size_bytes: int, capacity_bytes: int) -> int:
    """As `cost_of`, for rows of `size_bytes`."""
    return min(size_bytes + ELEMENT_BYTES, capacity_bytes // 2)


def row_bytes_max(capacity_bytes: int) -> int:
    """Rows that many bytes large cost what they are; larger ones are to be cut, if they can be."""
    return capacity_bytes // 2 - ELEMENT_BYTES


def compact(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows, without the neighbours that they were cut from.

    A slice keeps the whole of what it is a slice of: in a queue, that would be a multiple of what
    its bytes count as.
    """
    if batch.get_total_buffer_size() <= _SLACK * batch.nbytes + ELEMENT_BYTES:
        return batch
    return take(batch, np.arange(batch.num_rows))
