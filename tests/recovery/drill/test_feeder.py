"""Inputs are fed as fast as Spark commits, and every commit is written down."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.drill.cluster.polling import until
from recovery.drill.jobs.feeder import _PATIENCE_S, Feeder
from recovery.drill.report.drill_report import EpochDone

LIMIT_S = 60.0


class World:
    """A checkpoint in which somebody commits, and what was fed and told."""

    def __init__(self, folder: Path, *, feeds: bool = True) -> None:
        self.commits = folder / "commits"
        self.fed: list[int] = []
        self.told: list[EpochDone] = []
        self.time_s = 0.0
        self.looks = 0
        self.feeder = Feeder(
            folder,
            self.fed.append if feeds else None,
            now_s=self._now_s,
            driver=lambda: 7,
            committed=self.told.append,
        )

    def _now_s(self) -> float:
        self.looks += 1
        return self.time_s

    def commit(self, epoch: int, at_s: int = 1) -> None:
        self.commits.mkdir(parents=True, exist_ok=True)
        draft = self.commits / f".{epoch}"
        draft.touch()
        os.utime(draft, (at_s, at_s))
        draft.rename(self.commits / str(epoch))

    def wait_fed(self, count: int) -> None:
        until(lambda: len(self.fed) >= count, f"{count} inputs", LIMIT_S)

    def wait_told(self, count: int) -> None:
        until(lambda: len(self.told) >= count, f"{count} epochs", LIMIT_S)

    def wait_looked(self) -> None:
        """Long enough for all that is due without more time to be fed."""
        looks = self.looks + 5
        until(lambda: self.looks >= looks, "more looks", LIMIT_S)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    world.feeder.start()
    yield world
    world.feeder.stop()


def test_a_few_inputs_wait_and_one_more_comes_with_each_epoch(world: World) -> None:
    world.wait_fed(3)
    world.wait_looked()
    assert world.fed == [0, 1, 2], "the rest is for the epochs to come"
    world.commit(0)
    world.commit(1)
    world.wait_fed(5)
    world.wait_looked()
    assert world.fed == [0, 1, 2, 3, 4]
    assert world.feeder.last() == 1


def test_a_batch_that_took_two_inputs_does_not_stop_the_feeding(world: World) -> None:
    world.wait_fed(3)
    world.time_s += _PATIENCE_S + 1
    world.wait_fed(4)  # nothing was committed


def test_it_ends_with_as_many_inputs_as_are_wanted(world: World) -> None:
    world.wait_fed(3)
    world.feeder.enough(4)
    world.commit(0)
    until(world.feeder.done.is_set, "the end", LIMIT_S)
    for epoch in (1, 2):
        world.commit(epoch)
        world.wait_told(epoch + 1)
    assert world.fed == [0, 1, 2, 3]


def test_a_feed_that_hangs_does_not_hold_the_drill_up(tmp_path: Path) -> None:
    entered, release = threading.Event(), threading.Event()

    def feed(number: int) -> None:
        entered.set()
        release.wait(LIMIT_S)

    feeder = Feeder(
        tmp_path,
        feed,
        now_s=time.monotonic,
        driver=lambda: 1,
        committed=lambda done: None,
    )
    feeder.start()
    try:
        assert entered.wait(LIMIT_S)
        feeder.stop(timeout_s=0.2)
        assert feeder.hung
        began_s = time.monotonic()
        feeder.stop(timeout_s=LIMIT_S)
        assert time.monotonic() - began_s < LIMIT_S / 2, "it is not waited for twice"
    finally:
        release.set()
        feeder.join(LIMIT_S)


def test_a_batch_that_is_repeated_is_written_down_again(world: World) -> None:
    world.commit(0)
    world.commit(1)
    world.wait_told(2)
    (world.commits / "1").unlink()  # a query that goes back by a batch
    world.commit(1, at_s=2)
    world.wait_told(3)
    assert [(done.epoch, done.driver) for done in world.told] == [(0, 7), (1, 7), (1, 7)]
    assert world.feeder.epochs == world.told


def test_a_job_whose_input_is_there_is_only_watched(tmp_path: Path) -> None:
    world = World(tmp_path, feeds=False)
    world.feeder.start()
    assert world.feeder.done.is_set()
    world.commit(0)
    world.wait_told(1)
    world.commit(1)
    world.feeder.stop()
    assert [done.epoch for done in world.told] == [0, 1], "what was committed before the end counts"
