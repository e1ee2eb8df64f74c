"""What Spark's own operators set, and what is over when a query goes on here: TTLs and timers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.cloudpickle import register_pickle_by_value, unregister_pickle_by_value
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import statebackend
from tests.spark.from_spark.conftest import run_to_its_end, state_kept_here

LASTS_MS = 1000
OUTPUT = "k string, what string, said string"
FIRST, LATER = 0, 100
"""Ids of rows of the first batch are below LATER."""

# Half a minute and more: a query runs with Spark's own state first, which takes seconds a batch.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def travels_by_value() -> Iterator[None]:
    register_pickle_by_value(sys.modules[__name__])
    yield
    unregister_pickle_by_value(sys.modules[__name__])


class Expiring(StatefulProcessor):
    """States with a TTL, and a timer for each key that the first batch has."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.n = handle.getValueState("n", "n bigint", LASTS_MS)
        self.ids = handle.getListState("ids", "id bigint", LASTS_MS)
        self.tags = handle.getMapState("tags", "tag string", "n bigint", LASTS_MS)
        self.stays = handle.getValueState("stays", "n bigint")

    def seen(self) -> str:
        n = self.n.get()[0] if self.n.exists() else None
        ids = [row[0] for row in self.ids.get()]
        tags = [tag[0] for tag, _ in self.tags.iterator()]
        return json.dumps([n, ids, tags, self.stays.get()[0] if self.stays.exists() else None])

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        ids = sorted(row.id for row in rows)
        yield Row(k=key[0], what="rows", said=self.seen())
        if ids[0] < LATER:
            self.n.update((ids[0],))
            self.ids.put([(one,) for one in ids])
            self.tags.updateValue((f"t{ids[0]}",), (1,))
            self.stays.update((ids[0],))
            self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + LASTS_MS)

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[Row]:
        at_ms = expiredTimerInfo.getExpiryTimeInMs()
        yield Row(k=key[0], what="timer", said=f"{at_ms} {self.seen()}")

    def close(self) -> None:
        pass


def expiring(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """A function whose keys time out after the first batch."""
    n = state.get[0] if state.exists else None
    what = "timeout" if state.hasTimedOut else "rows"
    ids = sorted(int(one) for frame in frames for one in frame.id)
    if ids and ids[0] < LATER:
        state.update((ids[0],))
        state.setTimeoutDuration(LASTS_MS)
    if state.hasTimedOut:
        state.remove()  # else Spark calls it in each batch from now on
    yield pd.DataFrame([(key[0], what, str(n))], columns=["k", "what", "said"])


def _by_processor(rows: DataFrame) -> DataFrame:
    mode = "Append", "ProcessingTime"
    return rows.groupBy("k").transformWithState(Expiring(), OUTPUT, *mode)


def _by_function(rows: DataFrame) -> DataFrame:
    keys = rows.groupBy("k")
    schema = "n bigint"
    return keys.applyInPandasWithState(expiring, OUTPUT, schema, "append", "ProcessingTimeTimeout")


def _write(folder: Path, batch: int, rows: list[tuple[str, int]]) -> None:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps({"k": k, "id": one}) + "\n" for k, one in rows)
    (folder / f"{batch}.json").write_text(text)


def _one_batch(
    spark: SparkSession, root: Path, where: str, make: Callable[[DataFrame], DataFrame]
) -> list[Any]:
    """The rows that a query at a checkpoint location gives out for what is new."""
    rows: list[Any] = []
    frame = make(spark.readStream.schema("k string, id bigint").json(str(root / "in")))
    run_to_its_end(
        frame, root / where, lambda df, batch: rows.extend(map(list, df.collect())), once=True
    )
    return sorted(rows)


OVER = ["a", "rows", json.dumps([None, [], [], FIRST])]
"""What a key with new rows sees of its states: those with a TTL are empty."""
KEPT = ["a", "rows", str(FIRST)]
"""A function's state has no TTL."""
CASES = [
    (_by_processor, "Expiring", None, OVER),
    (_by_function, "expiring", "ProcessingTimeTimeout", KEPT),
]


@pytest.mark.full  # three batches of Spark's own operator and two here
@pytest.mark.parametrize(("make", "uid", "timeout", "seen"), CASES, ids=["processor", "function"])
def test_what_is_over_after_an_import_is_over_as_in_spark(
    spark: SparkSession,
    tmp_path: Path,
    make: Callable[[DataFrame], DataFrame],
    uid: str,
    timeout: str | None,
    seen: list[str],
) -> None:
    """Expired values are gone, and each timer fires in the first batch only, with its own time."""
    _write(tmp_path / "in", 0, [("a", FIRST), ("b", FIRST + 1), ("c", FIRST + 2)])
    assert len(_one_batch(spark, tmp_path, "spark", make)) == 3
    written_s = time.time()
    to = (tmp_path / "savepoint").as_uri()
    statebackend.import_spark(spark, str(tmp_path / "spark"), to, uid=uid, timeout=timeout)
    timers = statebackend.read_timers("", operator=uid, savepoint=to).read_all().to_pylist()
    assert len(timers) == 3
    assert max(one["at_ms"] for one in timers) <= written_s * 1000 + LASTS_MS + 1
    while time.time() * 1000 <= max(one["at_ms"] for one in timers):
        time.sleep(0.05)  # until it is over for both
    truths = []
    for batch, keys in ((1, ["a", "new"]), (2, ["a", "b"])):
        _write(tmp_path / "in", batch, [(key, LATER) for key in keys])
        truths.append(_one_batch(spark, tmp_path, "spark", make))
        with state_kept_here(spark, tmp_path, to):
            assert _one_batch(spark, tmp_path, "ours", make) == truths[-1]
    assert seen in truths[0]
    fired = [[row[0] for row in truth if row[1] != "rows"] for truth in truths]
    assert fired == [["a", "b", "c"], []], "once, and not later again"
