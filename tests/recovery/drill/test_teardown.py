"""What goes wrong in a drill is in its report; what goes wrong at its end hides neither."""

from __future__ import annotations

import stat
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recovery.drill.catalogue import ALL
from recovery.drill.driver.driver_messages import DriverConfig
from recovery.drill.faults.drill_fault import DrillFault
from recovery.drill.faults.needs import Given
from recovery.drill.faults.stage import CannotStrikeError
from recovery.drill.jobs.bundled_jobs import BUNDLED
from recovery.drill.jobs.drill_job import DrillJob
from recovery.drill.report.drill_report import EpochDone
from recovery.drill.run.drill_options import DrillOptions, named_faults
from recovery.drill.run.runner import run_drill
from recovery.drill.run.strike_schedule import Strike
from recovery.drill.run.striker import NOTHING_LEFT, Striker
from recovery.drill.run.teardown import TidyStack, end, failure_text
from statebackend.errors import DrillError

GIVEN = Given(cluster="local[2]", s3=False, commit="sync", compiler=False)


def test_a_drill_is_given_up_with_the_reason_whatever_was_raised() -> None:
    assert failure_text(DrillError("It hung.", todo="Look.")).endswith("It hung. Look.")
    expired = subprocess.TimeoutExpired("gcc", 3)
    assert failure_text(expired).startswith("the drill itself failed: TimeoutExpired: ")


def fail() -> None:
    raise ValueError("no such process")


def test_a_clean_up_that_fails_hides_neither_an_error_nor_a_result() -> None:
    cleaned = []

    def hang() -> None:
        with TidyStack() as stack:
            stack.callback(cleaned.append, 1)
            stack.callback(fail)
            raise DrillError("It hung.", todo="Look.")

    with pytest.raises(DrillError):
        hang()
    with TidyStack() as stack:
        stack.callback(cleaned.append, 2)
        stack.callback(fail)
    assert cleaned == [1, 2]
    assert stack.failures == ["At the end of the drill: ValueError: no such process"]


def test_everything_is_ended_though_one_thing_cannot_be() -> None:
    done: list[str] = []
    driver = SimpleNamespace(
        look=lambda: done.append("look"), condemn=fail, reap=lambda: done.append("reap")
    )
    feeder = SimpleNamespace(stop=lambda: done.append("feeder"), hung=True)
    stage: Any = SimpleNamespace(feeder=feeder, drivers=SimpleNamespace(every=[driver]))
    cluster: Any = SimpleNamespace(stop=lambda: done.append("cluster"))
    wrong = end(stage, cluster)
    assert done == ["feeder", "look", "cluster", "reap"]
    assert [text.split(": ")[-1] for text in wrong] == [
        "no such process",
        "The job's feed was still busy when the drill ended; it was left alone.",
    ]


def test_a_driver_is_told_by_a_file_that_only_its_owner_can_read(tmp_path: Path) -> None:
    config = DriverConfig(
        **dict.fromkeys(
            ("root", "master", "uri", "local_dir", "checkpoint", "out", "events", "stop", "build"),
            "x",
        ),
        parallelism=2,
        commit="sync",
        conf={"spark.hadoop.fs.s3a.secret.key": "s3cret"},
    )
    path = tmp_path / "1.told"
    config.write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert DriverConfig.read(path) == config


# --- faults that were made, and those that were not -----------------------------------------------


class Stage:
    """As much of a stage as a striker needs; epochs come as the test says."""

    def __init__(self) -> None:
        self.feeder = SimpleNamespace(epochs=[EpochDone(epoch=0, at_s=0.0, driver=1)])
        self.struck: list[str] = []
        self.drivers = self
        self.clock_s = 1.0

    def epoch(self, number: int) -> None:
        self.feeder.epochs.append(EpochDone(epoch=number, at_s=self.now_s(), driver=1))

    def now_s(self) -> float:
        self.clock_s += 0.1
        return self.clock_s

    def committed(self) -> int:
        return max(done.epoch for done in self.feeder.epochs)

    def until(self, condition: Any, what: str, timeout_s: float) -> None:
        assert condition(), f"waited for {what}"

    def has_read_all(self) -> bool:
        return True

    def is_ready(self) -> bool:
        return True

    def say(self, text: str) -> None: ...

    def over(self) -> None: ...


def struck(strike: Any) -> Any:
    """What is written down of a fault that strikes at epoch 0."""
    stage: Any = Stage()
    striker = Striker(stage, seed=1, given=GIVEN)
    fault = DrillFault(
        name="mine", summary="", promise="", strike=lambda _, rng: str(strike(stage))
    )
    striker.strike(Strike(fault=fault, after_epoch=0))
    (found,) = striker.struck
    return found


def test_a_fault_that_an_epoch_follows_is_made() -> None:
    found = struck(lambda stage: stage.epoch(1))
    assert (found.skipped, found.at_epoch) == ("", 0)
    assert 0 < found.recovered_s < 1


def test_a_batch_that_is_repeated_after_a_fault_is_the_recovery_from_it() -> None:
    assert struck(lambda stage: stage.epoch(0)).recovered_s is not None


def test_a_fault_that_strikes_a_job_with_nothing_left_to_do_does_not_count_as_made() -> None:
    found = struck(lambda stage: "executor 0")
    assert (found.skipped, found.recovered_s, found.target) == (NOTHING_LEFT, None, "executor 0")


def test_a_fault_that_cannot_be_made_says_why() -> None:
    def cannot(stage: Any) -> None:
        raise CannotStrikeError("no copy yet")

    assert struck(cannot).skipped == "no copy yet"


# --- what was asked for ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("duration_s", "given", "names"),
    [
        (None, ["driver-killed", ALL["driver-killed"]], ["driver-killed", "driver-killed"]),
        (9.0, ["driver-killed", "driver-killed", "host-lost"], ["driver-killed", "host-lost"]),
        (9.0, [], []),
        (None, [], []),
    ],
)
def test_the_report_knows_what_was_asked_for(
    duration_s: float | None, given: list[Any], names: list[str]
) -> None:
    options = DrillOptions(
        job=BUNDLED["timers"],
        faults=named_faults(given),
        at_epoch=None,
        duration_s=duration_s,
        seed=1,
        cluster="local[2]",
        commit="sync",
        store="file",
        subtasks=2,
        say=print,
    )
    assert options.names() == names


# --- whole drills, of which no driver comes up ----------------------------------------------------


def build(spark: Any, backend: Any, folder: Path) -> Any:
    raise NotImplementedError


def truth(folder: Path) -> list[tuple[int]]:
    return [(1,)]


def feed(folder: Path, number: int, seed: int) -> None:
    raise ValueError(f"input {number} cannot be made")


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where drills have their folders, on a machine without Java."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_feed_that_raises_is_in_the_report_and_so_is_where_to_look(no_java: Path) -> None:
    job = DrillJob(name="mine", build=build, truth=truth, feed=feed)
    report = run_drill(job, faults="executor-killed", cluster="local[2]")
    assert report.verdict.failure == "the drill itself failed: ValueError: input 0 cannot be made"
    assert report.verdict.lost == 1
    assert (report.asked, list(report.not_struck)) == (["executor-killed"], ["executor-killed"])
    (folder,) = no_java.glob("drill-*")
    assert report.warnings[-1] == f"The drill's folder was left for you to look at: {folder}."


def test_a_driver_reads_what_it_is_told_and_says_why_it_failed(no_java: Path) -> None:
    report = run_drill(build, truth=truth, cluster="local[2]", folder=no_java / "drill")
    (driver,) = report.drivers
    assert driver.ending == "failed"
    assert "Java" in driver.error
    assert "before any fault" in report.verdict.failure
    assert report.warnings == []
    assert stat.S_IMODE((no_java / "drill" / "drivers" / "1.told").stat().st_mode) == 0o600
