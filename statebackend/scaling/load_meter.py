"""What Spark says of a query's batches, and a backend of its state, as a load: pure."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from operator import itemgetter
from typing import Any

from snapshot.log.checkpoint_progress import CheckpointProgress
from statebackend.scaling.rescale_policy import Load

__all__ = ["Meter", "state_bytes_of", "waiting_rows_of"]


class Meter:
    """Turns the progress of a query's batches into measurements, each once.

    Args:
        batch_target_s: see `RescalePolicy`.
    """

    def __init__(self, *, batch_target_s: float) -> None:
        self._target_s = batch_target_s
        self._last_ms: float | None = None  # when the newest batch that was measured began

    def measure(
        self, progresses: Iterable[Mapping[str, Any]], *, at_s: float, state_bytes: int = 0
    ) -> list[Load]:
        """What is new in the newest progresses (as Spark's JSON has them), oldest first.

        The time from one batch to the next is known when the next one is there; the newest waits
        for its successor. A query that waits for input reports that as well.
        """
        batches = sorted({_began_ms(one): one for one in progresses}.items(), key=itemgetter(0))
        new = [(ms, one) for ms, one in batches if self._last_ms is None or ms >= self._last_ms]
        loads = []
        for (began_ms, one), (next_ms, _) in pairwise(new):
            apart_s = (next_ms - began_ms) / 1000
            loads.append(self._load(one, apart_s, at_s=at_s, state_bytes=state_bytes))
        if new:
            self._last_ms = new[-1][0]
        return loads

    def _load(
        self, one: Mapping[str, Any], apart_s: float, *, at_s: float, state_bytes: int
    ) -> Load:
        durations = one.get("durationMs") or {}
        worked = "addBatch" in durations
        busy_s = float(durations.get("triggerExecution", 0)) / 1000 if worked else 0.0
        rows = float(one.get("numInputRows") or 0)
        over_s = max(apart_s, self._target_s)
        return Load(
            at_s=at_s,
            busy_share=min(1.0, busy_s / over_s),
            input_rows_per_s=rows / apart_s if apart_s > 0 else 0.0,
            processed_rows_per_s=rows / busy_s if busy_s > 0 else 0.0,
            waiting_rows=waiting_rows_of(one.get("sources") or ()),
            state_bytes=state_bytes,
        )


def _began_ms(progress: Mapping[str, Any]) -> float:
    text = str(progress["timestamp"]).replace("Z", "+00:00")
    return datetime.datetime.fromisoformat(text).timestamp() * 1000


def waiting_rows_of(sources: Iterable[Mapping[str, Any]]) -> float | None:
    """The rows that lie in sources which number them, as Kafka does; None: no source says it."""
    known = [rows for source in sources if (rows := _rows_behind(source)) is not None]
    return sum(known) if known else None


def _rows_behind(source: Mapping[str, Any]) -> float | None:
    ends, latest = _offsets(source.get("endOffset")), _offsets(source.get("latestOffset"))
    if ends is None or latest is None:
        return None
    return float(sum(max(0, offset - ends.get(place, 0)) for place, offset in latest.items()))


def _offsets(said: Any) -> dict[tuple[str, str], int] | None:
    """``{"topic": {"partition": offset}}``; None for any other shape."""
    if isinstance(said, str):
        try:
            said = json.loads(said)
        except ValueError:
            return None
    if not isinstance(said, Mapping) or not said:
        return None
    found = {}
    for topic, partitions in said.items():
        if not isinstance(partitions, Mapping):
            return None
        for partition, offset in partitions.items():
            if not isinstance(offset, int) or isinstance(offset, bool):
                return None
            found[str(topic), str(partition)] = offset
    return found


def state_bytes_of(progress: CheckpointProgress) -> int:
    """What the newest snapshot of each subtask says of its store's size, over all of them."""
    newest = {
        (one.operator, one.subtask): one.figures.get("stored_bytes", 0) for one in progress.subtasks
    }
    return sum(newest.values())
