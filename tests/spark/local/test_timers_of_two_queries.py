"""One frame with timers that two queries run at the same time: each fires its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from tests.spark.local.world import until

if TYPE_CHECKING:
    from tests.spark.local.world import World

DELAY_MS = 2_000


class Later(StatefulProcessor):
    """Sets a timer two seconds after each batch."""

    def init(self, handle: Any) -> None:
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + DELAY_MS)
        yield Row(k=key[0], what="rows")

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[Row]:
        yield Row(k=key[0], what="timer")

    def close(self) -> None:
        pass


def test_a_second_query_over_a_frame_does_not_silence_the_first_ones_timers(world: World) -> None:
    backend = world.backend(job=None)
    frame = backend.transform_with_state(
        world.input.stream(world.spark).groupBy("k"),
        Later(),
        "k string, what string",
        "Append",
        "ProcessingTime",
    )
    seen: dict[str, list[tuple[str, str]]] = {"first": [], "second": []}

    def start(name: str) -> Any:
        def take(rows: Any, batch: int) -> None:
            seen[name] += [(row.k, row.what) for row in rows.collect()]

        writer = backend.write_stream(frame).outputMode("append").foreachBatch(take)
        return writer.option("checkpointLocation", str(world.root / name)).start()

    def fired(name: str, key: str) -> bool:
        return (key, "timer") in seen[name]

    first = start("first")
    for key in ("a", "b"):  # so that its epochs are ahead of the other's
        world.input.add_keys(key)
        first.processAllAvailable()
        until(lambda key=key: fired("first", key), f"the timer of {key}")
    second = start("second")
    second.processAllAvailable()
    world.input.add_keys("c")
    for query in (first, second):
        query.processAllAvailable()
    for name in seen:
        until(lambda name=name: fired(name, "c"), f"the timer of c in the {name} query")
    for query in (first, second):
        query.stop()
    assert seen["first"].count(("c", "timer")) == seen["second"].count(("c", "timer")) == 1
