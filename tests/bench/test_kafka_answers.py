"""A row is answered by the first output of its key that counts it."""

from __future__ import annotations

import numpy as np
import pytest

from bench.continuousjob import keys_of
from bench.kafka.answers import Outputs, answered_us, checked, latencies, rows_per_s

ROWS, KEYS = 1000, 7
OF = keys_of(np.arange(ROWS, dtype=np.int64), KEYS)


def _per_row(late_us: int = 0) -> Outputs:
    """An output for each row ``i``, at 1000 i microseconds."""
    counts = np.array([(OF[: i + 1] == OF[i]).sum() for i in range(ROWS)])
    return Outputs(OF, counts, np.arange(ROWS) * 1000 + late_us)


def _by_batch(rows: int) -> Outputs:
    """An output for each key of each batch of so many rows, at the batch's end."""
    keys, counts, at = [], [], []
    for end in range(rows, ROWS + 1, rows):
        for key in np.unique(OF[end - rows : end]):
            keys.append(key)
            counts.append((OF[:end] == key).sum())
            at.append(end * 1000)
    return Outputs(np.array(keys), np.array(counts), np.array(at))


def test_rows_that_are_answered_one_by_one_have_their_own_times() -> None:
    assert (answered_us(_per_row(), ROWS, KEYS) == np.arange(ROWS) * 1000).all()


def test_a_batch_answers_all_its_rows_at_its_end() -> None:
    ends = (np.arange(ROWS) // 100 + 1) * 100 * 1000
    assert (answered_us(_by_batch(100), ROWS, KEYS) == ends).all()


def test_an_output_that_comes_again_answers_nothing_anew() -> None:
    once = _per_row()
    again = Outputs(*(np.concatenate((c, c[:50])) for c in once))
    again.at_us[ROWS:] += 10_000_000
    assert (answered_us(again, ROWS, KEYS) == answered_us(once, ROWS, KEYS)).all()


def test_latency_counts_from_when_a_row_was_due() -> None:
    found = latencies(
        _per_row(late_us=5000),
        rows=ROWS,
        keys=KEYS,
        first=100,
        start_us=100 * 1000,
        rate=1000.0,
        warm_s=0.1,
    )
    assert found["p50_ms"] == found["max_ms"] == 5.0
    assert found["rows_measured"] == ROWS - 200
    assert found["behind_at_end_s"] == 0.005


@pytest.mark.parametrize("outputs", [_per_row(), _by_batch(50)], ids=["by row", "by batch"])
def test_throughput_is_rows_answered_and_not_outputs(outputs: Outputs) -> None:
    found = rows_per_s(outputs, warm_s=0.2)
    assert found["rows_per_s"] == pytest.approx(1000.0)
    assert found["rows_answered"] == ROWS


def test_a_row_that_was_never_counted_is_noticed() -> None:
    outputs = _per_row()
    assert checked(outputs, rows=ROWS, keys=KEYS, exactly_once=True)["counted_twice"] == 0
    short = Outputs(*(column[:-1] for column in outputs))
    with pytest.raises(ValueError, match="1 of 1000 rows are not counted"):
        checked(short, rows=ROWS, keys=KEYS, exactly_once=False)


def test_a_row_that_was_counted_twice_is_wrong_only_where_each_must_count_once() -> None:
    outputs = _per_row()
    outputs.counts[-1] += 1
    assert checked(outputs, rows=ROWS, keys=KEYS, exactly_once=False)["counted_twice"] == 1
    with pytest.raises(ValueError, match="1 are counted twice"):
        checked(outputs, rows=ROWS, keys=KEYS, exactly_once=True)
