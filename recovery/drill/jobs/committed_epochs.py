"""Which epochs of a drilled job are committed, by the `commits` folder of its checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["committed_epochs"]


def committed_epochs(checkpoint: Path) -> dict[int, int]:
    """The batches that Spark's checkpoint has as committed, with the nanosecond of each."""
    found = {}
    try:
        entries = list(os.scandir(checkpoint / "commits"))
    except FileNotFoundError:
        return {}
    for entry in entries:
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = entry.stat().st_mtime_ns
            except FileNotFoundError:  # a query that goes back by a batch removes it
                continue
    return found
