"""The rescale policy and whoever follows it, without Spark."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot.log.progress_book import ProgressBook
from statebackend.errors import FencedError, RescaleError, SettingError, StoreUnreachableError
from statebackend.scaling.load_meter import Meter, state_bytes_of, waiting_rows_of
from statebackend.scaling.rescale_policy import Load, RescalePolicy, Suggestion, suggest
from statebackend.scaling.rescaler import Rescaler

QUICK = RescalePolicy(window_s=20.0, warm_up_s=10.0, up_pause_s=30.0, down_pause_s=60.0)
UNBOUNDED = RescalePolicy(
    min_change_share=0.0, up_factor_max=1e9, down_factor_max=1e9, window_s=1.0, warm_up_s=0.0
)


def asked(
    busy: float | Iterable[float],
    *,
    parallelism: int = 4,
    max_parallelism: int = 128,
    policy: RescalePolicy = UNBOUNDED,
    cores: int | None = None,
    **load: Any,
) -> Suggestion | None:
    """What the policy says of a window of such loads, long after the last change."""
    shares = [busy] * 5 if isinstance(busy, int | float) else list(busy)
    window = [Load(at_s=1000.0, busy_share=share, **load) for share in shares]
    return suggest(
        window,
        policy=policy,
        parallelism=parallelism,
        max_parallelism=max_parallelism,
        now_s=1000.0,
        changed_s=-1e6,
        cores=cores,
    )


def chosen(parallelism: int, *args: Any, **given: Any) -> int:
    """The parallelism after the policy was asked."""
    found = asked(*args, parallelism=parallelism, **given)
    return found.parallelism if found else parallelism


parallelisms = st.integers(1, 128)
groups = st.integers(1, 1024)
shares = st.floats(0.0, 1.0)
waiting = st.floats(0.0, 1e9)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, int]:
    """A parallelism and a number of key groups that go together."""
    key_groups = draw(groups)
    return draw(st.integers(1, key_groups)), key_groups


# --- the policy -----------------------------------------------------------------------------------


@given(jobs(), shares, waiting, st.data())
def test_a_suggestion_never_leaves_the_range(
    job: tuple[int, int], busy: float, rows: float, data: st.DataObject
) -> None:
    parallelism, key_groups = job
    low = data.draw(st.integers(1, 200))
    high = data.draw(st.one_of(st.just(0), st.integers(low, 400)))
    policy = RescalePolicy(
        min_parallelism=low,
        max_parallelism=high,
        up_factor_max=data.draw(st.floats(1.1, 10)),
        down_factor_max=data.draw(st.floats(1.1, 10)),
        state_bytes_per_subtask_max=data.draw(st.sampled_from([0, 100])),
    )
    cores = data.draw(st.one_of(st.none(), st.integers(0, 300)))
    found = asked(
        busy,
        parallelism=parallelism,
        max_parallelism=key_groups,
        policy=policy,
        cores=cores,
        waiting_rows=rows,
        processed_rows_per_s=1000.0,
        state_bytes=data.draw(st.integers(0, 100_000)),
    )
    if found is not None:
        assert min(low, key_groups) <= found.parallelism <= min(high or key_groups, key_groups)
        assert found.parallelism != parallelism
        assert found.reason


@given(jobs(), shares, shares, waiting, waiting)
def test_more_load_never_asks_for_fewer_subtasks(
    job: tuple[int, int], busy: float, busier: float, rows: float, more_rows: float
) -> None:
    parallelism, key_groups = job
    asked_for = [
        chosen(
            parallelism,
            share,
            max_parallelism=key_groups,
            waiting_rows=behind,
            processed_rows_per_s=1000.0,
        )
        for share, behind in zip(sorted([busy, busier]), sorted([rows, more_rows]), strict=True)
    ]
    assert asked_for == sorted(asked_for)


def worth(parallelism: int, key_groups: int) -> float:
    """How many equally loaded subtasks the busiest one stands for."""
    return key_groups / -(-key_groups // parallelism)


@given(jobs(), shares)
def test_what_was_suggested_is_left_alone(job: tuple[int, int], busy: float) -> None:
    before, key_groups = job
    after = chosen(before, busy, max_parallelism=key_groups)
    then = busy * worth(before, key_groups) / worth(after, key_groups)
    assert asked(min(1.0, then), parallelism=after, max_parallelism=key_groups) is None


@given(jobs(), st.lists(st.floats(0.3, 0.9), min_size=3))
def test_a_load_that_stays_in_its_band_changes_nothing(
    job: tuple[int, int], busy: list[float]
) -> None:
    assert asked(busy, parallelism=job[0], max_parallelism=job[1]) is None


@given(jobs(), st.floats(0.91, 1.0))
def test_key_groups_are_spread_without_subtasks_that_are_worth_nothing(
    job: tuple[int, int], busy: float
) -> None:
    parallelism, key_groups = job
    after = chosen(parallelism, busy, max_parallelism=key_groups)
    if after != parallelism:
        assert worth(after, key_groups) > worth(after - 1, key_groups)


@pytest.mark.parametrize(
    ("parallelism", "busy", "expected"),
    [
        (4, 1.0, 8),  # 5.7 would do; 8 cuts each of the four in two
        (8, 0.1, 2),  # 1.1 would do
        (64, 1.0, 128),  # all between are no better than 64
        (3, 1.0, 6),
        (1, 0.0, 1),
        (128, 1.0, 128),
    ],
)
def test_subtasks_are_cut_and_put_together_in_whole_numbers(
    parallelism: int, busy: float, expected: int
) -> None:
    assert chosen(parallelism, busy) == expected


def test_rows_that_wait_are_to_be_worked_off_in_time() -> None:
    policy = RescalePolicy(catch_up_s=100.0)
    # 50,000 rows in 100 s are half of what four subtasks can do, on top of what comes in.
    load = {"waiting_rows": 50_000.0, "processed_rows_per_s": 1000.0}
    assert asked(0.6, policy=policy) is None
    assert chosen(4, 0.6, policy=policy, **load) == 8
    assert chosen(4, 0.6, policy=policy, waiting_rows=50_000.0) == 4  # at a rate nobody knows


def test_steps_are_bounded() -> None:
    policy = RescalePolicy(up_factor_max=2.0, down_factor_max=2.0, catch_up_s=1.0)
    load = {"waiting_rows": 1e9, "processed_rows_per_s": 1.0}
    assert chosen(8, 1.0, policy=policy, **load) == 16
    assert chosen(8, 0.0, policy=policy) == 4


def test_more_subtasks_than_cores_are_not_asked_for() -> None:
    assert chosen(4, 1.0, cores=4) == 4
    assert chosen(4, 1.0, cores=6) == 6
    assert chosen(8, 1.0, cores=4) == 8, "executors that are gone for a moment are no reason"
    assert chosen(4, 1.0, cores=4, policy=RescalePolicy(subtasks_per_core_max=2.0)) == 8


def test_much_state_asks_for_subtasks_and_keeps_them() -> None:
    policy = RescalePolicy(state_bytes_per_subtask_max=100, up_factor_max=10.0)
    assert chosen(4, 0.1, policy=policy, state_bytes=900) == 9
    assert chosen(9, 0.1, policy=policy, state_bytes=900) == 9
    assert chosen(16, 0.1, policy=policy, state_bytes=300) == 8


def test_a_change_that_is_not_worth_a_restart_is_not_made() -> None:
    policy = RescalePolicy(min_change_share=0.5)
    assert chosen(100, 0.91, max_parallelism=32768, policy=policy) == 100
    assert chosen(100, 0.91, max_parallelism=32768) > 100


def test_one_quiet_batch_takes_no_subtasks_away_and_one_busy_one_adds_none() -> None:
    assert asked([0.1, 0.1, 0.1, 0.1, 0.8]) is None
    assert asked([0.4, 0.4, 0.4, 0.4, 1.0]) is None


def test_too_few_measurements_say_nothing() -> None:
    assert asked([1.0, 1.0]) is None
    assert asked([1.0, 1.0, 1.0]) is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_parallelism": 0},
        {"min_parallelism": 8, "max_parallelism": 4},
        {"lower_busy_share": 0.5},
        {"upper_busy_share": 0.5},
        {"upper_busy_share": 1.1},
        {"window_s": 0.0},
        {"up_factor_max": 1.0},
        {"min_change_share": 1.0},
        {"min_samples": 0},
    ],
)
def test_a_policy_that_cannot_be_followed_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="What must hold"):
        RescalePolicy(**wrong)


# --- what Spark says ------------------------------------------------------------------------------


def batch(at: str, took_ms: int | None, rows: int = 0, **more: Any) -> dict[str, Any]:
    """A progress, as Spark's JSON has it; without a time it reports that nothing is there."""
    durations = {} if took_ms is None else {"addBatch": took_ms, "triggerExecution": took_ms}
    stamp = f"2026-01-01T00:{at}Z"
    return {"timestamp": stamp, "numInputRows": rows, "durationMs": durations, **more}


def test_each_batch_is_measured_once_when_the_next_one_is_there() -> None:
    meter = Meter(batch_target_s=1.0)
    first = [batch("00:00.000", 4000, 800), batch("00:10.000", 5000, 100)]
    (load,) = meter.measure(first, at_s=5.0, state_bytes=7)
    assert load == Load(
        at_s=5.0,
        busy_share=0.4,
        input_rows_per_s=80.0,
        processed_rows_per_s=200.0,
        state_bytes=7,
    )
    assert meter.measure(first, at_s=6.0) == []
    third = [*first, batch("00:15.000", None), batch("00:20.000", None)]
    assert [load.busy_share for load in meter.measure(third, at_s=7.0)] == [1.0, 0.0]


def test_short_batches_one_after_the_other_are_not_a_full_load() -> None:
    meter = Meter(batch_target_s=1.0)
    short = [batch(f"00:0{i // 5}.{i % 5 * 200:03}", 200, 10) for i in range(10)]
    assert {load.busy_share for load in meter.measure(short, at_s=1.0)} == {0.2}
    long = [batch(f"01:{5 * i:02}.000", 5000, 10) for i in range(4)]
    assert {load.busy_share for load in meter.measure(long, at_s=1.0)[1:]} == {1.0}


@pytest.mark.parametrize(
    ("end", "latest", "rows"),
    [
        ({"t": {"0": 10, "1": 5}}, {"t": {"0": 30, "1": 5}}, 20.0),
        ('{"t": {"0": 10}}', '{"t": {"0": 30, "1": 5}}', 25.0),
        ({"logOffset": 3}, {"logOffset": 5}, None),
        ("7", "9", None),
        (None, None, None),
        ("not json", "{}", None),
    ],
)
def test_rows_that_wait_are_counted_where_the_source_numbers_them(
    end: Any, latest: Any, rows: float | None
) -> None:
    assert waiting_rows_of([{"endOffset": end, "latestOffset": latest}]) == rows


def test_a_book_without_snapshots_has_no_state() -> None:
    assert state_bytes_of(ProgressBook("j").summary(None)) == 0


# --- who follows it -------------------------------------------------------------------------------


@dataclass
class World:
    """A clock, a load, and all the queries that were started."""

    now_s: float = 0.0
    demand: Callable[[float], float] = lambda now_s: 2.0
    queries: list[Query] = field(default_factory=list)
    refuse: Callable[[int], Exception | None] = lambda parallelism: None
    dies: Callable[[int], Exception | None] = lambda parallelism: None
    stop_fails: Exception | None = None
    end_s: float = 10_000.0

    def build(self, parallelism: int) -> Any:
        assert not any(query.active() for query in self.queries), "one query at a time"
        error = self.refuse(parallelism)
        if error is not None:
            raise error
        self.queries.append(Query(self, parallelism))
        return None, self.queries[-1]

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def rescaler(self, parallelism: int = 4, **given: Any) -> Rescaler:
        given.setdefault("policy", QUICK)
        return Rescaler(
            self.build,
            parallelism=parallelism,
            now_s=lambda: self.now_s,
            sleep_s=self.sleep,
            watch=lambda started: started[1],
            **given,
        )

    @property
    def ran(self) -> list[int]:
        return [query.parallelism for query in self.queries]


@dataclass
class Query:
    """Busy with a demand in subtasks' full time, split over those that there are."""

    world: World
    parallelism: int
    max_parallelism: int = 128
    job: str = "j"
    stopped: bool = False

    def cores(self) -> int | None:
        return None

    def active(self) -> bool:
        over = self.world.now_s >= self.world.end_s
        return not (self.stopped or over or self.world.dies(self.parallelism))

    def error(self) -> BaseException | None:
        return self.world.dies(self.parallelism)

    def has_run(self) -> bool:
        return self.active()

    def measure(self, at_s: float) -> list[Load]:
        busy = self.world.demand(at_s) / self.parallelism
        return [Load(at_s=at_s, busy_share=min(1.0, busy))]

    def stop(self) -> None:
        if self.world.stop_fails is not None:
            raise self.world.stop_fails
        self.stopped = True


def test_a_step_of_the_load_is_followed_once_each_way() -> None:
    def demand(now_s: float) -> float:
        return 8.0 if 1000 <= now_s < 4000 else 2.0

    world = World(demand=demand)
    rescaler = world.rescaler()
    rescaler.run()
    assert world.ran[0] == 4
    ups = [event for event in rescaler.rescales if event.to_parallelism > event.from_parallelism]
    downs = [event for event in rescaler.rescales if event.to_parallelism < event.from_parallelism]
    # 8 of 4 is seen as "all busy" only, so the way up has more than one step, and no step back.
    assert world.ran == [4, *[e.to_parallelism for e in ups], *[e.to_parallelism for e in downs]]
    assert max(world.ran) in range(9, 28)
    assert 0.3 <= 2.0 / world.ran[-1] <= 0.9
    assert all(event.failure == "" and "% busy" in event.reason for event in rescaler.rescales)


def test_a_load_that_swings_within_the_band_never_restarts_the_query() -> None:
    world = World(demand=lambda now_s: 1.4 if now_s // 37 % 2 else 3.4)
    world.rescaler().run()
    assert world.ran == [4]


def test_a_load_that_swings_out_of_the_band_restarts_it_no_more_often_than_its_pauses() -> None:
    world = World(demand=lambda now_s: 8.0 if now_s // 300 % 2 else 0.5, end_s=3000.0)
    rescaler = world.rescaler(policy=RescalePolicy(window_s=20.0, warm_up_s=10.0))
    rescaler.run()
    downs = [e for e in rescaler.rescales if e.to_parallelism < e.from_parallelism]
    assert len(downs) <= 3000.0 / rescaler.policy.down_pause_s


def test_a_change_that_fails_leaves_the_query_where_it_was() -> None:
    world = World(demand=lambda now_s: 4.0, end_s=55.0)
    world.refuse = lambda parallelism: RuntimeError("no room") if parallelism == 8 else None
    rescaler = world.rescaler()
    rescaler.run()
    assert world.ran == [4, 4]
    (event,) = rescaler.rescales
    assert (event.from_parallelism, event.to_parallelism, event.failure) == (4, 8, "no room")


def test_a_query_that_dies_in_its_first_batch_there_goes_back() -> None:
    world = World(demand=lambda now_s: 4.0, end_s=55.0)
    world.dies = lambda parallelism: RuntimeError("cannot restore") if parallelism == 8 else None
    rescaler = world.rescaler()
    rescaler.run()
    assert world.ran == [4, 8, 4]
    assert rescaler.rescales[0].failure == "cannot restore"
    assert rescaler.parallelism == 4


def test_after_repeated_failures_it_is_given_up_and_the_query_runs_on() -> None:
    world = World(demand=lambda now_s: 4.0)
    world.refuse = lambda parallelism: RuntimeError("no room") if parallelism == 8 else None
    rescaler = world.rescaler(failures_max=2)
    with pytest.raises(RescaleError, match=r"it runs at 4.*no room"):
        rescaler.run()
    assert len(rescaler.rescales) == 2
    assert world.queries[-1].active()
    assert world.queries[-1].parallelism == 4


def test_a_query_that_cannot_even_be_started_again_is_said_with_both_errors() -> None:
    world = World(demand=lambda now_s: 4.0)
    world.refuse = lambda parallelism: RuntimeError(f"not {parallelism}") if world.now_s else None
    with pytest.raises(RescaleError, match=r"not 8.*not 4"):
        world.rescaler().run()


def test_a_job_that_another_driver_has_is_not_taken_back() -> None:
    world = World(demand=lambda now_s: 4.0)
    fenced = FencedError("Another driver has the job.")
    world.refuse = lambda parallelism: fenced if parallelism == 8 else None
    with pytest.raises(FencedError):
        world.rescaler().run()
    assert world.ran == [4]


def test_a_stop_whose_end_is_not_durable_is_a_failed_change() -> None:
    world = World(demand=lambda now_s: 4.0, end_s=55.0)
    world.stop_fails = StoreUnreachableError("The last record is not durable.")
    rescaler = world.rescaler()
    rescaler.run()
    assert world.ran == [4], "it runs still, and is left alone"
    assert "not durable" in rescaler.rescales[0].failure


def test_a_query_that_fails_by_itself_fails_the_run() -> None:
    world = World(demand=lambda now_s: 2.0)
    world.dies = lambda parallelism: ValueError("the user's") if world.now_s > 100 else None
    with pytest.raises(ValueError, match="the user's"):
        world.rescaler().run()


def test_a_build_that_does_not_hand_the_parallelism_on_is_found_out() -> None:
    world = World()
    build = world.build
    world.build = lambda parallelism: build(7)  # type: ignore[method-assign]
    with pytest.raises(SettingError, match=r"parallelism 4, build.. made one at 7"):
        world.rescaler().run()
    assert not world.queries[0].active()


def test_in_a_thread_it_ends_with_the_query_between_two_batches() -> None:
    world = World(demand=lambda now_s: 2.0, end_s=float("inf"))
    rescaler = world.rescaler()
    rescaler.start()
    rescaler.stop()
    assert not world.queries[-1].active()
    assert rescaler.failure is None
    with pytest.raises(SettingError, match="started before"):
        rescaler.start()


def test_each_change_is_an_event(caplog: pytest.LogCaptureFixture) -> None:
    world = World(demand=lambda now_s: 4.0, end_s=100.0)
    with caplog.at_level(logging.INFO, "statebackend.progress"):
        world.rescaler().run()
    said = [msgspec.json.decode(r.message) for r in caplog.records if "rescaled" in r.message]
    (event,) = said
    assert (event["event"], event["job"]) == ("rescaled", "j")
    assert (event["from_parallelism"], event["to_parallelism"]) == (4, 8)
    assert event["reason"] == "100% busy at parallelism 4"
    assert event["failure"] == ""
