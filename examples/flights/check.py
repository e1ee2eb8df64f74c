"""Whether the sink holds what it must: compared row by row, column by column, exactly."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

Row = dict[str, Any]


@dataclass
class Comparison:
    """Rows by aircraft. ``differing``: (expected, found)."""

    equal: int = 0
    differing: list[tuple[Row, Row]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every row is there once and equal."""
        return self.equal > 0 and not (self.differing or self.missing or self.unexpected)


@dataclass(frozen=True)
class History:
    """The sink's rows of all epochs, by (aircraft, legs so far)."""

    rows: int
    lost: int
    repeated: int
    unexpected: int

    @property
    def ok(self) -> bool:
        """Whether each epoch left its rows exactly once."""
        return self.rows > 0 and not (self.lost or self.repeated or self.unexpected)


def compare(expected: pa.Table, sink: pa.Table) -> Comparison:
    """The batch computation against each aircraft's last row in the sink."""
    result = Comparison()
    found = final_state(sink)
    for row in expected.to_pylist():
        other = found.pop(row["tailnum"], None)
        if other is None:
            result.missing.append(row["tailnum"])
        elif row == other:
            result.equal += 1
        else:
            result.differing.append((row, other))
    result.unexpected.extend(found)
    return result


def final_state(sink: pa.Table) -> dict[str, Row]:
    """Each aircraft's last row: the one with the most legs."""
    last: dict[str, Row] = {}
    for row in sink.to_pylist():
        known = last.get(row["tailnum"])
        if known is None or row["legs"] > known["legs"]:
            last[row["tailnum"]] = row
    return last


def check_history(
    files: pd.Series, tailnums: pd.Series, ends: list[int], sink: pa.Table
) -> History:
    """Each epoch must have left one row per aircraft in it, with the legs up to then.

    An epoch that was lost, or counted twice, shows in the legs of every row after it.

    Args:
        files: the file that each row of the input was in.
        tailnums: the aircraft of each row.
        ends: how many files had been taken by the end of each epoch.
    """
    epochs = np.searchsorted(ends, files, side="right")
    per_epoch = tailnums.groupby([tailnums, epochs]).size()
    legs = per_epoch.groupby("tailnum").cumsum().reset_index(name="legs")
    expected = set(zip(legs["tailnum"], legs["legs"].tolist(), strict=True))
    found = Counter(zip(sink["tailnum"].to_pylist(), sink["legs"].to_pylist(), strict=True))
    return History(
        rows=sink.num_rows,
        lost=len(expected - found.keys()),
        repeated=sum(count - 1 for count in found.values()),
        unexpected=len(found.keys() - expected),
    )
