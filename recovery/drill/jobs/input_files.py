"""Writes the input files of drills: a seed and a number always give the same rows."""

from __future__ import annotations

import datetime
import json
import os
import random
from pathlib import Path
from typing import Any, Final

__all__ = ["ROWS", "feed_ordered_rows", "feed_rows", "feed_timed_rows"]

ROWS: Final = 300  # of an input file
KEYS: Final = 40
FILE_MS: Final = 7_000  # from one input file to the next, in event time
_BASE_MS: Final = 1_767_225_600_000
_FIRST_LATE: Final = 4  # the first input with late rows: by then there is a watermark for sure
# Of the continuous job. Subtasks read files side by side: the delay is as much as there may be
# between the file of one that stands still and the newest.
STEP_MS: Final = 2_000
SPAN_MS: Final = 4_000


def _write(folder: Path, number: int, rows: list[dict[str, Any]]) -> None:
    """One whole file at once, younger than those before it: Spark reads in that order."""
    (folder / "in").mkdir(parents=True, exist_ok=True)
    draft = folder / "in" / f".{number:06}.json"
    draft.write_text("\n".join(map(json.dumps, rows)))
    os.utime(draft, (1_700_000_000 + number, 1_700_000_000 + number))
    draft.replace(folder / "in" / f"{number:06}.json")


def feed_rows(folder: Path, number: int, seed: int) -> None:
    """Rows with a sequence number over all files."""
    rng = random.Random(f"{seed}:{number}")
    rows = [
        {"k": rng.randrange(KEYS), "seq": number * ROWS + i, "v": rng.randrange(1000)}
        for i in range(ROWS)
    ]
    rng.shuffle(rows)
    _write(folder, number, [row | {"file": number} for row in rows])


def feed_timed_rows(folder: Path, number: int, seed: int) -> None:
    """Rows with event times: out of order, none late but those of an hour ago."""
    rng = random.Random(f"{seed}:{number}")
    rows = []
    for i in range(ROWS):
        late = number >= _FIRST_LATE and i % 20 == 0
        at_ms = _BASE_MS + number * FILE_MS + 1000 * rng.randrange(12)
        at_ms -= 3_600_000 if late else 0
        moment = datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC)
        row = {"k": rng.randrange(KEYS), "v": rng.randrange(1000), "at_ms": at_ms, "late": late}
        rows.append(row | {"at": moment.strftime("%Y-%m-%d %H:%M:%S")})
    _write(folder, number, rows)


def feed_ordered_rows(folder: Path, number: int, seed: int) -> None:
    """Rows with event times: out of order, and none so late that a watermark may leave it out."""
    rng = random.Random(f"{seed}:{number}")
    rows = []
    for _ in range(ROWS):
        at_ms = _BASE_MS + number * STEP_MS + rng.randrange(SPAN_MS)
        at = datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC).isoformat()
        rows.append({"k": rng.randrange(KEYS), "v": rng.randrange(1000), "at_ms": at_ms, "at": at})
    _write(folder, number, rows)
