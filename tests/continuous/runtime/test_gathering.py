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


def test_that_it_has_become_slower_is_believed_after_some_calls() -> None:
    gathering = Gathering(target_s=0.02)
    for _ in range(5):
        gathering.took(1_000, 0.001)
    for _ in range(3):
        gathering.took(1_000, 0.1)
    assert gathering.more_bytes(1_000) == 0


def test_a_call_for_which_the_machine_had_no_time_changes_nothing() -> None:
    """What has piled up during it is taken as usual, and not in small calls."""
    gathering = Gathering(target_s=0.02)
    for seconds in (0.001, 0.001, 0.001, 0.2):
        gathering.took(1_000, seconds)
    assert gathering.more_bytes(1_000) == 19_000


def test_that_it_has_become_quicker_is_believed_by_and_by() -> None:
    gathering = Gathering(target_s=0.02)
    for _ in range(5):
        gathering.took(1_000, 0.01)
    found = []
    for _ in range(30):
        gathering.took(1_000, 0.001)
        found.append(gathering.more_bytes(0))
    assert found == sorted(found)
    assert found[-1] == 20_000
