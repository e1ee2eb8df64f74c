"""Strikes that move state, on a stage that writes down what is asked of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from recovery.drill.catalogue import ALL
from recovery.drill.faults.stage import CannotStrikeError


class Processes:
    """Executors, of which a killed one is replaced after two looks."""

    def __init__(self, executors: list[int]) -> None:
        self.there, self.looks = executors, 0

    def executors(self) -> list[int]:
        self.looks += 1
        if self.looks > 2 and self.there and len(self.there) < 2:
            self.there.append(99)
        return list(self.there)

    def kill(self, pids: list[int]) -> None:
        self.there = [pid for pid in self.there if pid not in pids]
        self.looks = 0


class Stage:
    """A driver that restores one subtask more whenever it is asked."""

    def __init__(self, executors: list[int] | None = None) -> None:
        self.processes = Processes(executors or [])
        self.parallelism, self.subtasks_max = 4, 9
        self.asked: list[str] = []
        self._restored = 0
        self.drivers = self

    def kill(self) -> None:
        self.asked.append("kill")

    def start(self, **told: Any) -> None:
        assert not told
        self.asked.append(f"start at {self.parallelism}")
        self._restored = 0

    def rescale(self, parallelism: int) -> None:
        self.parallelism = parallelism
        self.asked.append("rescale")

    def rebalance(self, executors: int) -> None:
        assert 99 in self.processes.there, "the replacement is there"
        self.asked.append(f"rebalance over {executors}")

    def restored(self) -> int:
        self._restored += 1
        return self._restored

    def committed(self) -> int:
        return 3

    def has_read_all(self) -> bool:
        return False

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
        for _ in range(100):
            if found := condition():
                return found
        raise AssertionError(what)


@pytest.mark.parametrize("seed", range(20))
def test_a_rescaled_job_gets_another_parallelism_once_nobody_runs_it(seed: int) -> None:
    stage = Stage()
    target = ALL["rescaled"].strike(stage, random.Random(seed))
    assert stage.asked == ["kill", "rescale"]
    assert 1 <= stage.drivers.parallelism != 4
    assert target == f"from 4 to {stage.drivers.parallelism} subtasks"


def test_a_job_whose_subtasks_need_slots_gets_no_more_than_there_are() -> None:
    stage = Stage()
    stage.drivers.parallelism, stage.subtasks_max = 2, 2
    assert ALL["rescaled"].strike(stage, random.Random(1)) == "from 2 to 1 subtasks"
    stage = Stage()
    stage.drivers.parallelism, stage.subtasks_max = 1, 1
    with pytest.raises(CannotStrikeError):
        ALL["rescaled"].strike(stage, random.Random(1))
    assert stage.asked == []


def test_a_rescale_is_crashed_while_subtasks_get_their_state() -> None:
    struck = []
    for seed in range(20):
        stage = Stage()
        rng = random.Random(seed)
        if random.Random(seed).choice(["subtasks", "lost", "landed"]) == "subtasks":
            struck.append(ALL["rescale-crashed"].strike(stage, rng))
            start = f"start at {stage.drivers.parallelism}"
            assert stage.asked == ["kill", "rescale", start, "kill", start]
    assert struck


@pytest.mark.parametrize("seed", range(4))
def test_subtasks_are_placed_anew_when_the_replacement_is_there(seed: int) -> None:
    stage = Stage([11, 12])
    assert "was replaced" in ALL["rebalanced"].strike(stage, random.Random(seed))
    assert stage.asked == ["rebalance over 2"]


def test_a_cluster_without_executors_has_nothing_to_place() -> None:
    with pytest.raises(CannotStrikeError):
        ALL["rebalanced"].strike(Stage(), random.Random(1))
