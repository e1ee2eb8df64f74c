"""A foreachBatch function may use its frame often, but whole, and in its own batch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from pyspark import inheritable_thread_target
from pyspark.sql import functions as F

from statebackend.errors import RewindError
from tests.spark.local.processors import Drawing, Flood, Noisy, Overtaken
from tests.spark.local.world import checkpoints, durable_state, sources

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame

    from statebackend import StateBackend
    from tests.spark.local.world import World

PARTIAL: dict[str, Callable[[DataFrame], Any]] = {
    "take": lambda frame: frame.take(1),
    "limit": lambda frame: frame.limit(2).collect(),
    "isEmpty": lambda frame: frame.isEmpty(),
    "ignore": lambda frame: None,
}


def _in_part(world: World, batch: int, use: Callable[[DataFrame], Any]) -> Any:
    """A sink that uses its frame in part in one batch, the first time."""
    flag, done = world.root / "flood", list[int]()

    def function(frame: DataFrame, number: int) -> None:
        function.calls.append(number)  # type: ignore[attr-defined]
        if number != batch or done:
            world.sink(frame, number)
            return
        done.append(number)
        flag.touch()  # what stops at the first row may find a small output made whole by then
        use(frame)
        flag.unlink()

    function.calls = []  # type: ignore[attr-defined]
    return function


def _flood(world: World) -> Flood:
    return Flood(str(world.root / "flood"))


# --- more than once ------------------------------------------------------------------------------


def test_a_frame_that_is_counted_and_written_is_one_epoch(world: World) -> None:
    counted: list[int] = []

    def twice(frame: DataFrame, batch: int) -> None:
        counted.append(frame.count())
        world.sink(frame.orderBy("k"), batch)  # sampled first, then evaluated again

    world.input.add_batches(2)
    backend = world.run_ledger(twice)
    world.check(backend)
    assert checkpoints(backend) == [("ledger", 0), ("ledger", 1)], "no record twice"
    assert counted == [len(rows) for rows in world.sink.batches().values()]


def test_a_persisted_frame_is_evaluated_once(world: World) -> None:
    def persisted(frame: DataFrame, batch: int) -> None:
        frame.persist()
        assert not frame.isEmpty()
        assert frame.count() > 0
        world.sink(frame, batch)
        frame.unpersist()

    world.input.add_batches(2)
    backend = world.run_ledger(persisted)
    world.check(backend)
    assert checkpoints(backend) == [("ledger", 0), ("ledger", 1)]


def test_evaluations_that_differ_leave_one_of_them_whole(world: World) -> None:
    def twice(frame: DataFrame, batch: int) -> None:
        assert frame.count() > 0
        world.sink(frame, batch)

    world.input.add_batches(2)
    backend = world.backend()
    world.run(backend, world.ledger(backend, processor=Noisy()), twice)
    world.check(backend)
    assert set(durable_state(backend, "ledger")["noise"]) == {(k,) for k in world.input.ids()}
    assert len(checkpoints(backend)) > 2, "the second evaluation superseded the first"


def test_two_threads_may_evaluate_a_frame_at_the_same_time(world: World) -> None:
    def pooled(frame: DataFrame, batch: int) -> None:
        evaluate = inheritable_thread_target(world.spark)
        with ThreadPoolExecutor(2) as pool:
            rows = pool.submit(evaluate(frame.collect))
            count = pool.submit(evaluate(frame.count))
            assert len(rows.result()) == count.result()
        world.sink.write(rows.result(), batch)

    world.input.add_batches(3)
    backend = world.run_ledger(pooled)
    world.check(backend)
    assert checkpoints(backend) == [("ledger", n) for n in range(3)]


# --- more than once, each time with another result -----------------------------------------------


def _check_follows(world: World, backend: StateBackend) -> None:
    """State is what follows from the output that was written."""
    backend.wait_durable()
    written = {(row["k"],): (row["n"], row["total"]) for row in world.sink.rows()}
    assert durable_state(backend, "ledger")["acc"] == written


@pytest.mark.parametrize("commit", ["sync", "async"])
def test_a_look_after_the_write_leaves_the_state_of_what_was_written(
    world: World, commit: str
) -> None:
    def looking(frame: DataFrame, batch: int) -> None:
        world.sink(frame, batch)
        frame.show(1)
        frame.where("n > 0").limit(1).collect()

    world.input.add_batches(3)
    backend = world.backend(commit=commit)
    world.run(backend, world.ledger(backend, processor=Drawing()), looking)
    _check_follows(world, backend)
    world.forget_local()  # and so it is where the next run begins
    world.input.add_batches(1)
    again = world.backend(commit=commit)
    world.run(again, world.ledger(again, processor=Drawing()))
    _check_follows(world, again)


@pytest.mark.parametrize("last", ["an action", "an action on its RDD"])
def test_of_two_whole_evaluations_the_state_is_of_the_second(world: World, last: str) -> None:
    def twice(frame: DataFrame, batch: int) -> None:
        frame.take(1)
        assert frame.count() > 0
        world.sink.write(frame.collect() if last == "an action" else frame.rdd.collect(), batch)
        frame.take(1)

    world.input.add_batches(3)
    backend = world.backend()
    world.run(backend, world.ledger(backend, processor=Drawing()), twice)
    _check_follows(world, backend)


def test_a_frame_that_is_kept_in_parts_is_one_epoch(world: World) -> None:
    def kept(frame: DataFrame, batch: int) -> None:
        frame.persist()
        frame.take(1)  # the first partition, which is not evaluated again
        world.sink(frame, batch)
        frame.unpersist()

    world.input.add_batches(3)
    backend = world.backend()
    world.run(backend, world.ledger(backend, processor=Drawing()), kept)
    _check_follows(world, backend)


def test_the_output_may_be_joined_with_itself_whichever_side_is_done_first(world: World) -> None:
    def joined(frame: DataFrame, batch: int) -> None:
        # Other columns on each side: else Spark would exchange the output once for both.
        left, right = frame.select("k", "ids"), frame.select("k", "n", "total")
        world.sink(left.join(right.hint("merge"), "k"), batch)

    folder = world.root / "met"
    folder.mkdir()
    for _ in range(3):
        world.input.add_keys("k", "k")  # one subtask waits, the other's slot is free
    backend = world.backend(settings={"lease_timeout_s": 0.1})
    log = world.store / "default" / "log"
    world.run(backend, world.ledger(backend, processor=Overtaken(str(folder), str(log))), joined)
    world.check(backend)
    assert len(list(folder.glob("*.overtaken"))) == 3, "two evaluations overlapped in each batch"
    assert checkpoints(backend) == [("ledger", n) for n in range(3)]


def test_the_output_may_be_united_with_itself_in_one_stage(world: World) -> None:
    def united(frame: DataFrame, batch: int) -> None:
        other = frame.filter("n > 0").repartition(1)
        rows = frame.coalesce(1).union(frame).union(other).collect()
        assert len(rows) % 3 == 0
        world.sink.write(sorted(rows)[::3], batch)

    world.input.add_batches(3)
    backend = world.run_ledger(united, settings={"lease_timeout_s": 0.1})
    world.check(backend)


# --- in part -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["limit", "isEmpty", "ignore"])
def test_a_batch_that_was_used_in_part_is_found_out_and_repeated(world: World, how: str) -> None:
    world.input.add_batches(3)
    backend = world.backend()
    frame = world.ledger(backend, processor=_flood(world))
    sink = _in_part(world, 1, PARTIAL[how])
    text = world.fail(backend, frame, sink)
    assert world.committed() == [0, 1]
    assert backend.lineages()["ledger"].last_epoch == 0
    sink.calls.clear()
    world.run(backend, frame, sink)
    assert sink.calls[0] == 1, "back by exactly one batch"
    world.check(backend)
    assert set(sources(backend).values()) == {"local"}

    assert "SB5001" in text
    assert "batch 1 was not finished by operator(s) 'ledger'" in text
    assert "isEmpty(), take(), first(), limit()" in text


@pytest.mark.parametrize("how", ["take", "ignore"])
def test_the_first_batch_of_all_may_be_repeated_too(world: World, how: str) -> None:
    world.input.add_batches(2)
    backend = world.backend()
    sink = _in_part(world, 0, PARTIAL[how])
    assert "SB5001" in world.fail(backend, world.ledger(backend), sink)
    again = world.backend()
    world.run(again, world.ledger(again), sink)
    assert sink.calls == [0, 1, 0, 1]
    world.check(again)


def test_two_batches_in_a_row_that_nobody_used_are_refused_for_good(world: World) -> None:
    world.input.add_batches(4)
    backend = world.backend()
    frame = world.ledger(backend)
    world.fail(backend, frame, lambda f, n: None if n in (1, 2) else world.sink(f, n))
    with pytest.raises(RewindError, match="2 batches would have to be repeated"):
        world.start(backend, frame)
    assert world.committed() == [0, 1, 2], "nothing was taken away"
    assert backend.lineages()["ledger"].last_epoch == 0


def test_a_partial_read_that_nobody_noticed_before_the_end_is_repeated_at_the_next_start(
    world: World,
) -> None:
    world.input.add_batches(2)
    backend = world.backend()
    frame = world.ledger(backend)
    world.run(backend, frame, _in_part(world, 1, PARTIAL["ignore"]))
    assert world.committed() == [0, 1]
    world.input.add_batches(1)
    world.run(backend, frame)
    world.check(backend)


def test_no_operator_loses_a_first_batch_that_only_another_one_finished(world: World) -> None:
    def sides(backend: StateBackend) -> DataFrame:
        left = world.ledger(backend, uid="left").withColumn("side", F.lit("left"))
        right = world.ledger(backend, uid="right").withColumn("side", F.lit("right"))
        return left.union(right)

    def left_only(frame: DataFrame, batch: int) -> None:
        if batch == 0:
            frame.take(1)  # the first partition, which is all of the operator on the left
        else:
            world.sink(frame, batch)

    world.input.add_batches(2)
    backend = world.backend(parallelism=1)
    assert "SB5001" in world.fail(backend, sides(backend), left_only)
    backend = world.backend(parallelism=1)
    world.run(backend, sides(backend))
    truth = {(k,): (len(ids), sum(ids)) for k, ids in world.input.ids().items()}
    assert durable_state(backend, "left")["acc"] == truth
    assert durable_state(backend, "right")["acc"] == truth


@pytest.mark.parametrize("how", ["take", "ignore"])
def test_checked_finds_it_out_within_the_batch(world: World, how: str) -> None:
    world.input.add_batches(2)
    backend = world.backend()
    frame = world.ledger(backend)
    sink = backend.checked(_in_part(world, 1, PARTIAL[how]))
    text = world.fail(backend, frame, sink)
    assert "SB5001" in text
    assert world.committed() == [0], "Spark has not committed the batch"
    world.run(backend, frame, sink)
    world.check(backend)


def test_checked_finds_it_out_in_the_first_batch_too(world: World) -> None:
    world.input.add_batches(2)
    backend = world.backend()
    frame = world.ledger(backend)
    sink = backend.checked(_in_part(world, 0, PARTIAL["ignore"]))
    assert "did not use its frame" in world.fail(backend, frame, sink)
    assert world.committed() == []
    world.run(backend, frame, sink)
    world.check(backend)


def test_a_look_before_the_whole_hides_no_restore(world: World) -> None:
    def looking(frame: DataFrame, batch: int) -> None:
        frame.take(1)
        world.sink(frame, batch)

    world.input.add_batches(1)
    world.run_ledger(looking)
    world.input.add_batches(1)
    backend = world.run_ledger(looking)
    world.check(backend)
    assert sources(backend) == {("ledger", 0): "local", ("ledger", 1): "local"}


# --- in another batch ----------------------------------------------------------------------------


def _kept(world: World, kept_in: int, used_in: int, *, own: bool) -> Callable[..., None]:
    """A sink that evaluates, once, the frame of another batch, and then its own or not."""
    kept: list[DataFrame] = []

    def function(frame: DataFrame, batch: int) -> None:
        if batch == kept_in:
            kept.append(frame)
        if batch == used_in and kept:
            rows = kept.pop().collect()
            if not own:
                world.sink.write(rows, batch)
                return
        world.sink(frame, batch)

    return function


@pytest.mark.parametrize("used_in", [1, 3])
def test_a_kept_frame_is_refused_in_every_later_batch(world: World, used_in: int) -> None:
    world.input.add_batches(used_in + 1)
    backend = world.backend(parallelism=1)
    frame = world.ledger(backend)
    text = world.fail(backend, frame, _kept(world, 0, used_in, own=False))
    assert "SB5002" in text
    assert f"belongs to another batch was evaluated in batch {used_in}" in text
    world.run(backend, frame)
    world.check(backend)


def test_a_kept_frame_is_refused_after_the_right_one_too(world: World) -> None:
    kept: list[DataFrame] = []

    def function(frame: DataFrame, batch: int) -> None:
        world.sink(frame, batch)
        for other in kept:
            other.collect()
        kept.append(frame)

    world.input.add_batches(2)
    backend = world.backend()
    frame = world.ledger(backend)
    assert "SB5002" in world.fail(backend, frame, function)
    world.run(backend, frame)
    world.check(backend)


def test_a_thread_of_a_pool_has_no_batch_and_is_told_so(world: World) -> None:
    def pooled(frame: DataFrame, batch: int) -> None:
        with ThreadPoolExecutor(1) as pool:
            world.sink.write(pool.submit(frame.collect).result(), batch)

    world.input.add_batches(1)
    backend = world.backend()
    frame = world.ledger(backend)
    text = world.fail(backend, frame, pooled)
    assert "SB5002" in text
    assert "in a thread that Spark gave no batch id" in text
    assert "inheritable_thread_target" in text
    world.run(backend, frame)
    world.check(backend)
