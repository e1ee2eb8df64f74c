"""When subtasks are placed anew, and which of them move, without Spark."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Collection
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from py4j.protocol import Py4JError

from snapshot.log.progress_book import ProgressBook
from statebackend.spark.frames.rebalance_plan import PlacementWatch, surplus
from statebackend.spark.frames.rebalancing import LOOK_EVERY_S, Rebalancer

SETTLE_S = 10.0


def due_at(sightings: dict[float, str], *, placed: str = "ab", until_s: float = 1000.0) -> list:
    """When subtasks are placed, if executors (one letter each) are seen so from these times on."""
    watch = PlacementWatch(placed=frozenset(placed), settle_s=SETTLE_S)
    there, found = frozenset(placed), []
    for tick in range(int(until_s)):
        if tick in sightings:
            there = frozenset(sightings[tick])
        watch = watch.seen(there, tick)
        if watch.due(tick):
            found.append(tick)
            watch = watch.tried(there, tick, done=True)
    return found


def test_a_replacement_that_stays_gets_subtasks_once() -> None:
    assert due_at({5: "a", 20: "ac"}) == [30]


def test_nobody_is_placed_while_nothing_changes() -> None:
    assert due_at({}) == []


def test_executors_that_come_one_after_the_other_are_placed_together() -> None:
    assert due_at({5: "abc", 12: "abcd", 19: "abcde"}) == [29]


def test_one_that_flaps_moves_nothing() -> None:
    flaps = {float(tick): "ab" if tick % 8 else "abc" for tick in range(0, 1000, 4)}
    assert due_at(flaps) == []


def test_one_that_stays_does_not_wait_for_one_that_flaps() -> None:
    flaps = {float(tick): "abd" if tick % 8 else "abcd" for tick in range(0, 1000, 4)}
    (once,) = due_at(flaps)
    assert once <= 30


def test_one_that_was_lost_for_a_moment_counts_as_new() -> None:
    assert due_at({5: "a", 9: "ab"}) == [19]


def test_without_a_replacement_the_others_share_what_it_had() -> None:
    assert due_at({5: "a"}) == [35]


def test_nothing_is_done_while_nobody_is_there() -> None:
    assert due_at({5: "", 200: "c"}) == [210]


def test_executors_that_keep_dying_after_they_settled_make_the_pauses_longer() -> None:
    turn = {float(30 * number): "a" + "bc"[number % 2] for number in range(200)}
    found = due_at(turn, until_s=6000.0)
    apart = [later - earlier for earlier, later in pairwise(found)]
    assert len(found) < 15
    assert apart[0] >= 60
    assert apart[-1] > 600


def test_what_failed_is_tried_again_after_a_pause() -> None:
    watch = PlacementWatch(placed=frozenset("a"), settle_s=SETTLE_S).seen("ab", 0.0)
    assert watch.due(10.0)
    watch = watch.tried("ab", 10.0, done=False).seen("ab", 11.0)
    assert not watch.due(11.0)
    assert watch.due(70.0)


@given(st.integers(1, 40), st.integers(1, 8), st.randoms(use_true_random=False))
def test_no_more_move_than_must_and_then_all_have_the_same(
    subtasks: int, executors: int, rng: random.Random
) -> None:
    names = [f"e{number}" for number in range(executors)]
    places = {s: rng.choice([*names, "gone"]) for s in range(subtasks) if rng.random() < 0.9}
    leaving = surplus(places, names, subtasks)
    kept = Counter(e for s, e in places.items() if s not in leaving and e in names)
    assert max(kept.values(), default=0) <= -(-subtasks // executors)
    free = subtasks - sum(kept.values())
    room = sum(max(0, subtasks // executors - kept[name]) for name in names)
    assert room <= free, "nobody is left with less than the share"
    # Whoever gives one away had more than any share.
    for subtask in leaving:
        before = sum(executor == places[subtask] for executor in places.values())
        assert before > subtasks // executors


def test_without_executors_nobody_leaves() -> None:
    assert surplus({0: "a"}, [], 1) == []


class Places:
    """Subtasks on executors, as Spark has them; what is nowhere goes where there are fewest."""

    def __init__(self, at: str, there: str) -> None:
        self.subtasks = len(at)
        self.at, self.there = dict(enumerate(at)), there
        self.says, self.fails, self.clings = True, 0, 0
        self.jobs = 0

    def executors(self) -> frozenset[str]:
        return frozenset(self.there)

    def places(self) -> dict[int, str] | None:
        return dict(self.at) if self.says else None

    def drop(self, subtasks: Collection[int]) -> None:
        self.was = dict(self.at)
        for subtask in subtasks:
            del self.at[subtask]

    def fill(self) -> None:
        self.jobs += 1
        if self.fails:
            self.fails -= 1
            raise RuntimeError("the job was cancelled\nand more")
        if self.clings:  # a batch was faster, where they were
            self.clings -= 1
            self.at = self.was
        for subtask in range(self.subtasks):
            held = Counter(self.at.values())
            self.at.setdefault(subtask, min(self.there, key=lambda executor: held[executor]))


class Watching:
    """A rebalancer beside a query, in a time of its own."""

    def __init__(self, places: Places, changes: dict[float, str], *, ends_s: float = 300.0) -> None:
        self.now_s, self.ends_s = 0.0, ends_s
        self.places, self.changes = places, changes
        self.book = ProgressBook("j")
        self.rebalancer = Rebalancer(
            lambda: places,
            job="j",
            automatic=True,
            settle_s=SETTLE_S,
            now_s=lambda: self.now_s,
            sleep_s=self.sleep,
        )

    def sleep(self, seconds: float) -> None:
        assert seconds >= 1.0, "nothing is looked at more often than that"
        self.now_s += seconds
        for at_s in [at_s for at_s in self.changes if at_s <= self.now_s]:
            self.places.there = self.changes.pop(at_s)
            self.places.at = {
                s: e if e in self.places.there else min(self.places.there, default="")
                for s, e in self.places.at.items()
            }

    def run(self) -> None:
        thread = self.rebalancer.watch(
            lambda: self.now_s < self.ends_s, self.book, lambda: int(self.now_s)
        )
        assert thread is not None
        thread.join(20.0)
        assert not thread.is_alive(), "it ends with its query"


def test_a_replaced_executor_gets_its_share_and_the_progress_says_so() -> None:
    watching = Watching(Places("aabb", "ab"), {20.0: "a", 40.0: "ac"})
    watching.run()
    assert Counter(watching.places.at.values()) == {"a": 2, "c": 2}
    progress = watching.book.summary(None)
    assert progress.rebalances == 1
    event = progress.last_rebalance
    assert event is not None
    assert (event.reason, event.joined, event.left) == ("automatic", ["c"], ["b"])
    assert event.executors_before == {"a": 4, "c": 0}
    assert event.executors_after == {"a": 2, "c": 2}
    assert event.subtasks_moved == 2
    assert 40 + SETTLE_S <= (event.epoch or 0) <= 40 + SETTLE_S + 2 * LOOK_EVERY_S
    assert watching.places.jobs == 1


def test_a_placing_that_fails_is_tried_again_and_harms_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watching = Watching(Places("aaaa", "a"), {20.0: "ab"})
    watching.places.fails = 1
    watching.run()
    assert Counter(watching.places.at.values()) == {"a": 2, "b": 2}
    assert watching.book.summary(None).rebalances == 1
    assert "the query goes on as it is: the job was cancelled" in caplog.text
    assert "and more" not in caplog.text


@pytest.mark.parametrize("times", [2, 12])
def test_subtasks_that_batches_put_back_are_moved_again(times: int) -> None:
    watching = Watching(Places("aaaa", "a"), {20.0: "ab"})
    watching.places.clings = times
    watching.run()
    assert Counter(watching.places.at.values()) == {"a": 2, "b": 2}
    assert watching.book.summary(None).rebalances == 1
    assert watching.places.jobs == times + 1


def test_an_executor_without_a_need_costs_no_job() -> None:
    watching = Watching(Places("ab", "ab"), {20.0: "abc"})
    watching.run()
    assert watching.places.jobs == 0
    assert watching.book.summary(None).rebalances == 0


def test_executors_that_register_late_get_subtasks() -> None:
    watching = Watching(Places("aaaa", "abcd"), {})
    watching.run()
    assert sorted(watching.places.at.values()) == list("abcd")


def test_nobody_is_watched_in_local_mode_or_where_it_is_off() -> None:
    local = Rebalancer(lambda: Places("ab", ""), job="j", automatic=True, settle_s=1.0)
    off = Rebalancer(lambda: Places("ab", "ab"), job="j", automatic=False, settle_s=1.0)
    for rebalancer in (local, off):
        assert rebalancer.watch(lambda: True, ProgressBook(), lambda: None) is None


def test_by_hand_it_is_done_at_once_and_said(caplog: pytest.LogCaptureFixture) -> None:
    places, book = Places("aaab", "abc"), ProgressBook("j")
    rebalancer = Rebalancer(lambda: places, job="j", automatic=False, settle_s=1.0)
    with caplog.at_level(logging.INFO, "statebackend.progress"):
        rebalancer.by_hand(book, 7)
    assert sorted(Counter(places.at.values()).values()) == [1, 1, 2]
    (said,) = [msgspec.json.decode(r.message) for r in caplog.records if "rebalanced" in r.message]
    assert (said["event"], said["reason"], said["epoch"]) == ("rebalanced", "by hand", 7)
    assert book.summary(None).rebalances == 1


def test_where_spark_does_not_say_who_is_where_all_are_placed_anew() -> None:
    places, book = Places("aaaa", "ab"), ProgressBook("j")
    places.says = False
    Rebalancer(lambda: places, job="j", automatic=False, settle_s=1.0).by_hand(book, None)
    assert Counter(places.at.values()) == {"a": 2, "b": 2}
    event = book.summary(None).last_rebalance
    assert event is not None
    assert (event.executors_before, event.subtasks_moved) == ({}, 4)


def test_by_hand_it_is_done_even_where_spark_names_no_executors() -> None:
    class Closed(Places):
        def executors(self) -> frozenset[str]:
            raise Py4JError("not allowed")

    places = Closed("aaaa", "ab")
    Rebalancer(lambda: places, job="j", automatic=True, settle_s=1.0).by_hand(None, None)
    assert Counter(places.at.values()) == {"a": 2, "b": 2}
    watching = Rebalancer(lambda: places, job="j", automatic=True, settle_s=1.0)
    assert watching.watch(lambda: True, ProgressBook(), lambda: None) is None


def test_by_hand_without_executors_or_frames_nothing_happens() -> None:
    places, book = Places("aa", ""), ProgressBook("j")
    Rebalancer(lambda: places, job="j", automatic=False, settle_s=1.0).by_hand(book, 1)
    Rebalancer(lambda: None, job="j", automatic=False, settle_s=1.0).by_hand(book, 1)
    assert (places.jobs, book.summary(None).rebalances) == (0, 0)
