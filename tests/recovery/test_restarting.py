"""Whether a job is started again, and after how long."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.decide.restart_strategy import (
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
    Restarts,
    Strategy,
    is_final,
)
from statebackend.errors import (
    EnvironmentMissingError,
    FencedError,
    PeerLostError,
    ProcessorError,
    RescaleError,
    SettingError,
    SparkLostError,
    StateMismatchError,
    UnsupportedTypeError,
)


def delays(strategy: Strategy, times_s: Iterable[float], drawn: float = 0.5) -> list[float | None]:
    restarts = Restarts(strategy)
    found = []
    for now_s in times_s:
        restarts, delay_s = restarts.failed(now_s, drawn)
        found.append(delay_s)
    return found


def test_no_restart() -> None:
    assert delays(NoRestart(), [0]) == [None]


def test_a_fixed_delay_so_many_times() -> None:
    assert delays(FixedDelay(3, 2.0), [1, 50, 1000, 9999, 99999]) == [2.0, 2.0, 2.0, None, None]
    assert delays(FixedDelay(0), [1]) == [None]
    assert delays(FixedDelay(delay_s=0.5), range(100)) == [0.5] * 100


def test_a_delay_that_grows_to_its_largest() -> None:
    growing = ExponentialDelay(initial_s=1, max_s=10, factor=2, jitter=0)
    assert delays(growing, [0, 2, 5, 10, 20, 40]) == [1, 2, 4, 8, 10, 10]


def test_a_job_that_ran_long_enough_begins_anew() -> None:
    growing = ExponentialDelay(initial_s=1, max_s=10, factor=2, jitter=0, reset_after_s=60)
    # Counted from when it ran again: the failure at 5 is followed by 4 s without it.
    assert delays(growing, [0, 2, 5, 68.9, 143]) == [1, 2, 4, 8, 1]


def test_jitter_is_a_share_up_or_down_and_keeps_the_largest() -> None:
    growing = ExponentialDelay(initial_s=10, max_s=15, factor=2, jitter=0.2)
    assert delays(growing, [0, 20], drawn=0.0) == [8.0, 12.0]
    assert delays(growing, [0, 20], drawn=0.5) == [10.0, 15.0]
    assert delays(growing, [0, 20], drawn=0.999) == [pytest.approx(12, abs=0.01), 15.0]


def test_a_rate_of_failures() -> None:
    rate = FailureRate(2, per_s=10, delay_s=1.0)
    assert delays(rate, [0, 1, 11, 12, 13]) == [1.0, 1.0, 1.0, 1.0, None]
    assert delays(rate, [0, 5, 9]) == [1.0, 1.0, None]
    assert delays(FailureRate(0, per_s=10), [0]) == [None]


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedDelay(-1),
        lambda: FixedDelay(1, -1.0),
        lambda: ExponentialDelay(initial_s=0),
        lambda: ExponentialDelay(initial_s=2, max_s=1),
        lambda: ExponentialDelay(factor=0.5),
        lambda: ExponentialDelay(jitter=1.5),
        lambda: ExponentialDelay(reset_after_s=-1),
        lambda: FailureRate(-1, per_s=1),
    ],
)
def test_a_strategy_that_means_nothing_is_refused(make: Callable[[], Strategy]) -> None:
    with pytest.raises(SettingError):
        make()


GAPS = st.lists(st.floats(0, 100), min_size=1, max_size=30)


@given(GAPS, st.floats(0, 0.999), st.floats(0, 1))
def test_an_exponential_delay_stays_within_its_limits(
    gaps: list[float], drawn: float, jitter: float
) -> None:
    strategy = ExponentialDelay(initial_s=0.5, max_s=8, factor=2, jitter=jitter, reset_after_s=50)
    now_s, restarts = 0.0, Restarts(strategy)
    for gap_s in gaps:
        restarts, delay_s = restarts.failed(now_s, drawn)
        assert delay_s is not None
        assert 0 <= delay_s <= 8
        now_s += delay_s + gap_s


@given(GAPS, st.integers(0, 5), st.floats(1, 100))
def test_a_rate_gives_up_exactly_when_more_failures_lie_within_its_time(
    gaps: list[float], failures: int, per_s: float
) -> None:
    times_s: list[float] = []
    restarts, now_s = Restarts(FailureRate(failures, per_s)), 0.0
    for gap_s in gaps:
        now_s += gap_s
        times_s.append(now_s)
        restarts, delay_s = restarts.failed(now_s)
        within = sum(now_s - then_s < per_s for then_s in times_s)
        assert (delay_s is None) is (within > failures)
        assert len(restarts.recent_s) == within


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize(
    "error", [FencedError("f"), RescaleError("r"), SparkLostError("s"), StateMismatchError("m")]
)
def test_what_would_come_again_is_final_at_any_time(error: Exception, has_run: bool) -> None:
    assert is_final(error, has_run=has_run)


@pytest.mark.parametrize("error", [SettingError("s"), UnsupportedTypeError("u")])
def test_what_the_user_gave_is_final_until_the_job_has_run(error: Exception) -> None:
    assert is_final(error, has_run=False)
    assert not is_final(error, has_run=True)


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize(
    "error", [ProcessorError("p"), EnvironmentMissingError("e"), PeerLostError("l"), OSError("o")]
)
def test_what_may_pass_or_be_another_hosts_is_not_final(error: Exception, has_run: bool) -> None:
    assert not is_final(error, has_run=has_run)


def test_delays_may_have_the_forms_that_sparks_settings_have() -> None:
    assert delays(FixedDelay(2, "500ms"), [0, 1, 2]) == delays(FixedDelay(2, 0.5), [0, 1, 2])
    within = FailureRate(1, "1 minute", "2 seconds")
    assert delays(within, [0, 30]) == [2.0, None]
    assert delays(within, [0, 61]) == [2.0, 2.0]
    growing = ExponentialDelay(initial_s="1s", max_s="2s", factor=4, jitter=0.0)
    assert delays(growing, [0, 1]) == [1.0, 2.0]
    with pytest.raises(SettingError, match="delay_s is 'soon'"):
        FixedDelay(3, "soon")
