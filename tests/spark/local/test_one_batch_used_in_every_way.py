"""A batch's frame is used in every way that foreachBatch allows, and each result is compared.

Each way gives whole results; what they must be is computed from the input files in plain Python.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from pyspark import inheritable_thread_target
from pyspark.sql import functions as F

from tests.spark.local.processors import Drawing
from tests.spark.local.world import checkpoints, durable_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

    from tests.spark.local.world import Rows, World


# --- ways to use a frame: each returns its whole results, the last of which is written -----------


def _twice(frame: DataFrame) -> list[list[Any]]:
    return [frame.collect(), frame.collect()]


def _in_part(frame: DataFrame) -> list[list[Any]]:
    frame.take(1)
    frame.limit(2).collect()
    assert not frame.isEmpty()
    whole = frame.collect()
    frame.show(1)
    frame.head()
    return [whole]


def _joined(frame: DataFrame) -> list[list[Any]]:
    # Other columns on each side: else Spark would exchange the output once for both.
    left, right = frame.select("k", "ids"), frame.select("k", "n", "total")
    return [left.join(right.hint("merge"), "k").collect()]


def _united(frame: DataFrame) -> list[list[Any]]:
    rows = sorted(frame.union(frame).collect())
    return [rows[::2], rows[1::2]]


def _in_threads(frame: DataFrame) -> list[list[Any]]:
    evaluate = inheritable_thread_target(frame.sparkSession)
    with ThreadPoolExecutor(3) as pool:
        whole = [pool.submit(evaluate(frame.collect)) for _ in range(2)]
        pool.submit(evaluate(lambda: frame.take(2))).result()
        return [one.result() for one in whole]


def _kept(frame: DataFrame) -> list[list[Any]]:
    frame.persist()
    kept = frame.collect()
    frame.unpersist(blocking=True)
    return [kept, frame.collect()]


def _kept_in_part(frame: DataFrame) -> list[list[Any]]:
    frame.persist()
    frame.take(1)
    kept = frame.collect()
    frame.unpersist(blocking=True)
    frame.take(1)
    return [kept]


def _written_and_counted(frame: DataFrame) -> list[list[Any]]:
    with tempfile.TemporaryDirectory() as folder:
        frame.write.mode("overwrite").parquet(folder)
        written = frame.sparkSession.read.parquet(folder).collect()
    assert frame.count() == len(written)
    return [written]


def _written_at_the_second_try(frame: DataFrame) -> list[list[Any]]:
    down = F.raise_error(F.lit("the sink is down"))
    with pytest.raises(Exception, match="the sink is down"):
        frame.withColumn("written", F.when(F.col("n") > 0, down)).collect()
    return [frame.collect()]


def _by_chance(frame: DataFrame) -> list[list[Any]]:
    frame.where(F.rand() < 0.5).collect()
    return [frame.repartition(3, F.rand()).collect()]


def _sorted(frame: DataFrame) -> list[list[Any]]:
    return [frame.orderBy("k").collect()]  # sampled first, then evaluated again


WAYS = {
    "twice": _twice,
    "in part": _in_part,
    "joined": _joined,
    "united": _united,
    "in threads": _in_threads,
    "kept": _kept,
    "kept in part": _kept_in_part,
    "written and counted": _written_and_counted,
    "written at the second try": _written_at_the_second_try,
    "by chance": _by_chance,
    "sorted": _sorted,
}
# Those that end with the evaluation that is written, so that state must follow from it.
IN_TURN = [
    name for name in WAYS if name not in ("joined", "united", "in threads", "written and counted")
]


class Used:
    """A foreachBatch function that uses each batch's frame in a way of its own.

    Args:
        ways: by batch, over again. fails_in: batches in which it fails once, after it has written.
    """

    def __init__(self, world: World, ways: list[str], fails_in: set[int] | None = None) -> None:
        self.world, self.ways = world, ways
        self.fails_in = set(fails_in or ())
        self.results: dict[int, list[list[Any]]] = {}

    def __call__(self, frame: DataFrame, batch: int) -> None:
        whole = WAYS[self.ways[batch % len(self.ways)]](frame)
        self.results.setdefault(batch, []).extend(whole)
        self.world.sink.write(whole[-1], batch)
        if batch in self.fails_in:
            self.fails_in.remove(batch)
            raise ConnectionError("the sink is lost")


def _fill(world: World, batches: int, seed: int = 0) -> list[Rows]:
    """The rows of each batch."""
    draw = random.Random(seed)
    return [
        world.input.add_keys(*(f"k{draw.randrange(9)}" for _ in range(draw.randrange(1, 40))))
        for _ in range(batches)
    ]


def _truth(batches: list[Rows]) -> Iterator[list[tuple[Any, ...]]]:
    """What the ledger gives in each batch."""
    seen: dict[str, list[int]] = defaultdict(list)
    for rows in batches:
        new: dict[str, list[int]] = defaultdict(list)
        for row in rows:
            new[row["k"]].append(row["id"])
            seen[row["k"]].append(row["id"])
        yield [(k, sorted(new[k]), len(seen[k]), sum(seen[k])) for k in sorted(new)]


def _compare(used: Used, batches: list[Rows]) -> None:
    for number, wanted in enumerate(_truth(batches)):
        way = used.ways[number % len(used.ways)]
        for rows in used.results[number]:
            found = sorted((row.k, sorted(row.ids), row.n, row.total) for row in rows)
            assert found == wanted, (number, way)


def test_each_way_gives_the_rows_that_the_input_gives(world: World) -> None:
    batches = _fill(world, len(WAYS))
    used = Used(world, list(WAYS))
    backend = world.run_ledger(used, commit="async")
    _compare(used, batches)
    world.check(backend)
    assert {epoch for _, epoch in checkpoints(backend)} == set(range(len(WAYS)))


def test_state_follows_what_was_written_where_evaluations_differ(world: World) -> None:
    _fill(world, len(IN_TURN))
    used = Used(world, IN_TURN)
    backend = world.backend()
    world.run(backend, world.ledger(backend, processor=Drawing()), used)
    written = {(row["k"],): (row["n"], row["total"]) for row in world.sink.rows()}
    assert durable_state(backend, "ledger")["acc"] == written


def test_a_batch_that_is_repeated_after_each_way_gives_the_same_rows_on_a_busy_machine(
    world: World,
) -> None:
    ways = ["in threads", "joined", "kept", "written and counted"]
    batches = _fill(world, len(ways))
    used = Used(world, ways, fails_in={0, 2})
    with _busy(3):
        for _ in range(2):
            backend = world.backend()
            assert "the sink is lost" in world.fail(backend, world.ledger(backend), used)
        world.forget_local()
        backend = world.run_ledger(used)
    _compare(used, batches)
    assert len(used.results[0]) == len(used.results[2]) == 4, "two evaluations, twice"
    world.check(backend)


@contextlib.contextmanager
def _busy(processes: int) -> Iterator[None]:
    """Keep the machine busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("commit", ["sync", "async"])
def test_ways_at_random_on_a_busy_machine_give_the_rows_that_the_input_gives(
    world: World, commit: str
) -> None:
    draw = random.Random(commit)
    batches = _fill(world, 20, seed=1)
    ways = draw.choices(list(WAYS), k=len(batches))
    used = Used(world, ways, fails_in=set(draw.sample(range(len(batches)), 3)))
    with _busy(4):
        while used.fails_in:
            backend = world.backend(commit=commit)
            assert "the sink is lost" in world.fail(backend, world.ledger(backend), used)
            if draw.random() < 0.5:
                world.forget_local()
        backend = world.run_ledger(used, commit=commit)
    _compare(used, batches)
    world.check(backend)
