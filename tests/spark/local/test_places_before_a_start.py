"""The anchor is filled while the driver goes on; a start waits until each subtask has its place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from pyspark.sql import SparkSession

from statebackend.spark.frames.anchor import Anchor
from statebackend.spark.frames.rebalancing import SparkPlaces
from tests.spark.local.world import World, finish, manifests

PARALLELISM = 3  # no other test's, whose anchor would be cached already


def test_a_start_waits_until_each_subtask_has_its_place(
    spark: SparkSession, make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, may_fill, waits = threading.Event(), threading.Event(), threading.Event()
    fill, ready = Anchor._fill, Anchor.ready

    def late(anchor: Anchor) -> None:
        asked.set()
        assert may_fill.wait(60)
        fill(anchor)

    def wait(anchor: Anchor) -> None:
        waits.set()
        ready(anchor)

    monkeypatch.setattr(Anchor, "_fill", late)
    monkeypatch.setattr(Anchor, "ready", wait)
    world = make_world()
    world.input.add_batches(1)
    backend = world.backend(parallelism=PARALLELISM)
    frame = world.ledger(backend)
    assert asked.wait(60), "it begins when the frame is made"
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(world.start, backend, frame)
        assert waits.wait(60)
        assert not started.done()
        assert not spark.streams.active
        assert not manifests(backend)
        may_fill.set()
        query = started.result(60)
    (anchor,) = backend._builder._anchors.values()
    assert SparkPlaces(spark, anchor).places() == dict.fromkeys(range(PARALLELISM), "driver")
    finish(query)
    world.check(backend)


def test_a_job_of_the_anchor_that_fails_fails_the_start(
    spark: SparkSession, make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails, fill = [True], Anchor._fill

    def broken(anchor: Anchor) -> None:
        if fails[0]:
            raise RuntimeError("no executor")
        fill(anchor)

    monkeypatch.setattr(Anchor, "_fill", broken)
    world = make_world()
    world.input.add_batches(1)
    backend = world.backend(parallelism=PARALLELISM)
    frame = world.ledger(backend)
    with pytest.raises(RuntimeError, match="no executor"):
        world.start(backend, frame)
    assert not spark.streams.active
    assert not manifests(backend)
    fails[0] = False  # such as a job that was cancelled by Ctrl-C
    finish(world.start(backend, frame))
    world.check(backend)
