"""When rows were answered, from what a reader of the output topic saw.

Row ``i`` of the input has a key made of ``i`` alone; it is the ``j``-th of its key. It is answered
by the first output of its key with a count of ``j`` or more. So sides that write a count for each
row and sides that write one for each key of a batch are measured alike, and nothing but key and
count has to be in the output.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.continuousjob import keys_of, percentiles_ms

__all__ = ["Outputs", "answered_us", "checked", "latencies", "rows_per_s"]

_NEVER = np.iinfo(np.int64).max
_Ints = NDArray[np.int64]


class Outputs(NamedTuple):
    """The output's records in the order in which they were read."""

    keys: _Ints
    counts: _Ints
    at_us: _Ints

    def last(self, keys: int) -> _Ints:
        """The highest count of each key."""
        found = np.zeros(keys, np.int64)
        np.maximum.at(found, self.keys, self.counts)
        return found


class _Climbs(NamedTuple):
    """Outputs by key, in their order within a key; how far the key had come with each."""

    keys: _Ints
    reached: _Ints
    at_us: _Ints
    before: _Ints


def _climbs(outputs: Outputs) -> _Climbs:
    order = np.argsort(outputs.keys, kind="stable")
    keys, counts, at_us = (column[order] for column in outputs)
    step = int(counts.max(initial=0)) + 1
    reached = np.maximum.accumulate(keys * step + counts) - keys * step
    before = np.concatenate(([0], reached[:-1])) if len(keys) else reached
    before[np.flatnonzero(np.diff(keys, prepend=-1))] = 0
    return _Climbs(keys, reached, at_us, before)


def answered_us(outputs: Outputs, rows: int, keys: int) -> _Ints:
    """When each row of the input was answered, in microseconds; the greatest number: never."""
    of = _climbs(outputs)
    wanted = keys_of(np.arange(rows, dtype=np.int64), keys)
    order = np.argsort(wanted, kind="stable")
    sorted_keys = wanted[order]
    starts = np.searchsorted(sorted_keys, np.arange(keys))
    ordinal = np.arange(rows) - starts[sorted_keys] + 1
    step = max(int(of.reached.max(initial=0)), int(ordinal.max(initial=0))) + 1
    at = np.searchsorted(of.keys * step + of.reached, sorted_keys * step + ordinal)
    found = np.full(rows, _NEVER)
    inside = at < len(of.keys)
    inside[inside] = of.keys[at[inside]] == sorted_keys[inside]
    found[order[inside]] = of.at_us[at[inside]]
    return found


def latencies(
    outputs: Outputs, *, rows: int, keys: int, first: int, start_us: int, rate: float, warm_s: float
) -> dict[str, Any]:
    """How late rows were answered, after they were due.

    Args:
        first: the row that was due at ``start_us``; the next ones follow at ``rate`` a second.
        warm_s: rows that were due earlier than so long after it do not count.
    """
    answered = answered_us(outputs, rows, keys)
    counted = first + round(rate * warm_s)
    numbers = np.arange(counted, rows)
    due_us = start_us + ((numbers - first) * (1e6 / rate)).astype(np.int64)
    took_us = answered[counted:] - due_us
    there = answered[counted:] != _NEVER
    report = percentiles_ms(took_us[there])
    last_us = int(answered[answered != _NEVER].max())
    return report | {
        "rows_measured": int(there.sum()),
        "behind_at_end_s": round((last_us - int(due_us[-1])) / 1e6, 3),
    }


def rows_per_s(outputs: Outputs, warm_s: float) -> dict[str, Any]:
    """How many rows of the input were answered a second, from ``warm_s`` after the first on.

    From an output to an output: with sides that write by the batch or by the checkpoint, that is
    from the end of one to the end of another.
    """
    of = _climbs(outputs)
    order = np.argsort(of.at_us, kind="stable")
    at_us, answered = of.at_us[order], np.cumsum((of.reached - of.before)[order])
    if not len(at_us):
        raise ValueError("nothing was written into the output topic")
    warm = int(np.searchsorted(at_us, at_us[0] + warm_s * 1e6, side="right")) - 1
    seconds = (at_us[-1] - at_us[warm]) / 1e6
    if seconds <= 0:
        raise ValueError(f"all outputs came within {warm_s} s: too few rows to measure")
    return {
        "rows_per_s": round(float(answered[-1] - answered[warm]) / float(seconds), 1),
        "counted_s": round(float(seconds), 3),
        "rows_answered": int(answered[-1]),
    }


def checked(outputs: Outputs, *, rows: int, keys: int, exactly_once: bool) -> dict[str, int]:
    """Whether the last count of every key is right.

    Raises:
        ValueError: a row was not counted, or one was counted twice where that must not be.
    """
    wanted = np.bincount(keys_of(np.arange(rows, dtype=np.int64), keys), minlength=keys)
    last = outputs.last(keys)
    missing, twice = np.maximum(wanted - last, 0).sum(), np.maximum(last - wanted, 0).sum()
    if missing or (exactly_once and twice):
        raise ValueError(f"{missing} of {rows} rows are not counted, {twice} are counted twice")
    return {"rows": rows, "outputs": len(outputs.keys), "counted_twice": int(twice)}
