from __future__ import annotations

from statebackend.continuous.worker.batch_sizing import Gathering


def test_nothing_more_is_taken_before_it_is_known_how_long_it_takes() -> None:
    assert Gathering().more_bytes(100) == 0


def test_a_quick_operator_is_given_what_takes_the_time_aimed_at() -> None:
    gathering = Gathering(target_s=0.02)
    gathering.took(1_000, 0.001)
    assert gathering.more_bytes(1_000) == 19_000


def test_a_slow_operator_is_given_no_more() -> None:
    gathering = Gathering(target_s=0.02)
    gathering.took(1_000, 0.001)
    gathering.took(1_000, 1.0)
    assert gathering.more_bytes(1_000) == 0


def test_that_it_has_become_quicker_is_believed_by_and_by() -> None:
    gathering = Gathering(target_s=0.02)
    gathering.took(1_000, 0.01)
    found = []
    for _ in range(30):
        gathering.took(1_000, 0.001)
        found.append(gathering.more_bytes(0))
    assert 2_000 < found[0] < 4_000
    assert found == sorted(found)
    assert found[-1] > 19_000
