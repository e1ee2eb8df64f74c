"""Asynchronous commits are refused where a batch could not be repeated exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from statebackend.errors import UnsupportedQueryError
from tests.spark.local.world import failure, finish

if TYPE_CHECKING:
    from tests.spark.local.world import World


def test_files_that_the_source_removes_are_refused(world: World) -> None:
    cleaned = (
        world.spark.readStream.schema(world.input.schema)
        .option("cleanSource", "delete")
        .json(str(world.input.folder))
    )
    with pytest.raises(UnsupportedQueryError, match="cleanSource=delete"):
        world.ledger(world.backend(commit="async"), cleaned)
    world.ledger(world.backend(commit="sync"), cleaned)


def test_a_source_that_is_not_known_to_repeat_is_refused_unless_vouched_for(world: World) -> None:
    def frame():  # type: ignore[no-untyped-def]
        lines = (
            world.spark.readStream.format("socket")
            .option("host", "127.0.0.1")
            .option("port", 9)
            .load()
        )
        return lines.selectExpr("value as k", "1L as id")

    with pytest.raises(UnsupportedQueryError, match=r"'socket'.*repeatableSources"):
        world.ledger(world.backend(commit="async"), frame())
    vouched = {"repeatable_sources": "mine, socket"}
    world.ledger(world.backend(commit="async", settings=vouched), frame())


def test_a_file_sink_is_refused_because_it_skips_what_it_has(world: World) -> None:
    world.input.add_batches(1)
    backend = world.backend(commit="async")
    frame = world.ledger(backend)
    writer = (
        frame.writeStream.format("parquet")
        .option("checkpointLocation", str(world.location))
        .option("path", str(world.root / "files"))
        .trigger(availableNow=True)
    )
    with pytest.raises(UnsupportedQueryError, match="FileStreamSink"):
        backend.start(writer)
    assert backend.lineages() == {}
    assert world.committed() == []


def test_a_foreach_batch_function_must_be_checked(world: World) -> None:
    world.input.add_batches(2)
    backend = world.backend(commit="async")
    frame = world.ledger(backend)
    with pytest.raises(UnsupportedQueryError, match=r"backend\.checked\(\)"):
        backend.start(world.writer(frame))
    assert backend.lineages() == {}
    world.run(backend, frame)  # as the world starts it: checked
    world.check(backend)


def test_a_function_may_be_wrapped_where_the_query_is_started(world: World) -> None:
    world.input.add_batches(2)
    backend = world.backend(commit="async")
    frame = world.ledger(backend)
    with backend.starting():
        query = world.writer(frame, backend.checked(world.sink)).start()
    finish(query)
    world.check(backend)


def test_the_function_that_is_checked_must_be_the_query_s_own(world: World) -> None:
    """Another one was wrapped: then Spark would commit batches that were read in part."""
    world.input.add_batches(4)
    backend = world.backend(commit="async")
    frame = world.ledger(backend)
    backend.checked(world.sink)
    said = failure(backend.start(world.writer(frame)))
    assert "SB1013" in said
    assert "Batch 0 was not checked" in said
    assert world.committed() == [0]
    again = world.backend(commit="async")
    world.run(again, world.ledger(again))  # as the world starts it: checked
    world.check(again)
