"""Several queries of one backend: what is said of one, or done to it, leaves the others alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from statebackend.errors import SettingError, UnsupportedQueryError
from tests.spark.local.world import finish

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from tests.spark.local.world import World


class Seen:
    """A foreachBatch function that knows the batches which it was given."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, frame: DataFrame, batch: int) -> None:
        frame.collect()
        self.batches.append(batch)


def _writer(world: World, frame: DataFrame, sink: Any, name: str) -> Any:
    location = {"checkpointLocation": str(world.root / name)}
    return frame.writeStream.options(**location).foreachBatch(sink)


def test_a_checked_function_asks_the_query_whose_batch_it_has(world: World) -> None:
    world.input.add_batches(1)
    backend = world.backend(job=None)
    sinks = Seen(), Seen()
    first = backend.start(_writer(world, world.ledger(backend), backend.checked(sinks[0]), "first"))
    first.processAllAvailable()
    second = backend.start(
        _writer(world, world.ledger(backend), backend.checked(sinks[1]), "second")
    )
    second.processAllAvailable()
    world.input.add_batches(1)
    for query, sink in zip((first, second), sinks, strict=True):
        query.processAllAvailable()
        query.stop()
        assert sink.batches == [0, 1]


def test_one_writer_may_be_started_at_two_locations(world: World) -> None:
    world.input.add_batches(1)
    backend, sink = world.backend(job=None), Seen()
    writer = backend.write_stream(world.ledger(backend)).foreachBatch(sink)
    queries = []
    for name in ("first", "second"):
        queries.append(writer.option("checkpointLocation", str(world.root / name)).start())
        queries[-1].processAllAvailable()
    world.input.add_batches(1)
    for query in queries:
        query.processAllAvailable()
        query.stop()
    assert sink.batches == [0, 0, 1, 1]


def test_another_query_s_checked_function_does_not_vouch_for_this_one(world: World) -> None:
    world.input.add_batches(1)
    backend = world.backend(job=None, commit="async")
    writer = _writer(world, world.ledger(backend), backend.checked(Seen()), "first")
    finish(backend.start(writer.trigger(availableNow=True)))
    unchecked = _writer(world, world.ledger(backend), Seen(), "second")
    with pytest.raises(UnsupportedQueryError, match=r"backend\.checked\(\)"):
        backend.start(unchecked.trigger(availableNow=True))


def _run_in_a_block(world: World, backend: Any, frame: DataFrame, name: str) -> list[int]:
    sink = Seen()
    with backend.starting(checkpoint_location=str(world.root / name)):
        query = _writer(world, frame, sink, name).trigger(availableNow=True).start()
    finish(query)
    return sink.batches


def test_a_block_takes_the_job_of_its_location(world: World) -> None:
    world.input.add_batches(1)
    backend = world.backend(job=None)
    assert _run_in_a_block(world, backend, world.ledger(backend, uid="one"), "first") == [0]
    first = backend.job
    assert _run_in_a_block(world, backend, world.ledger(backend, uid="two"), "second") == [0]
    assert backend.job != first
    assert list(backend.lineages()) == ["two"], "of its own frame only"
    world.input.add_batches(1)
    again = world.backend(job=None)
    assert _run_in_a_block(world, again, world.ledger(again, uid="one"), "first") == [1]
    assert again.job == first


def test_a_block_without_a_location_and_a_job_is_told_to_give_one(world: World) -> None:
    backend = world.backend(job=None)
    world.ledger(backend)
    with pytest.raises(SettingError, match="checkpoint_location="), backend.starting():
        pass


def test_a_block_takes_its_own_frames_where_another_query_has_the_same_uid(world: World) -> None:
    world.input.add_batches(1)
    backend = world.backend(job=None)
    both = world.ledger(backend, uid="a").union(world.ledger(backend, uid="b"))
    assert _run_in_a_block(world, backend, both, "first") == [0]
    assert _run_in_a_block(world, backend, world.ledger(backend, uid="a"), "second") == [0]
    world.input.add_batches(1)
    assert _run_in_a_block(world, backend, both, "first") == [1]
    assert sorted(backend.lineages()) == ["a", "b"]
