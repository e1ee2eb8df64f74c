"""`statebackend drill`: what is typed, what reaches the drill, what is printed, the exit status.

Each drill is answered at once with a report made by hand.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from recovery.drill.catalogue import ALL
from recovery.drill.jobs.bundled_jobs import BUNDLED
from recovery.drill.report.drill_report import DrillReport, Struck
from recovery.drill.run import runner
from statebackend.cli.job_commands import app
from statebackend.errors import DrillError
from tests.recovery.drill.reports import LOSSES, full_report

FAULT = "executor-killed"


def drill(*args: str, status: int = 0) -> Result:
    done = CliRunner().invoke(app, ["drill", *args])
    assert done.exit_code == status, done.output
    return done


class Stand:
    """Stands in for `run_drill`: notes what it was told, and gives the report that it is given."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}
        self.report = full_report(faults=[Struck(fault=FAULT, at_s=1.0, at_epoch=1)])
        self.before: Callable[[], object] = lambda: None

    def __call__(self, job: object, **told: Any) -> DrillReport:
        self.told = {"job": job, **told}
        (Path(told["folder"]) / "driver.log").parent.mkdir(exist_ok=True)
        (Path(told["folder"]) / "driver.log").write_text("hello")
        told["on_progress"]("   1.2 s  [1] epoch 0 committed")
        self.before()
        return msgspec.structs.replace(self.report, seed=told["seed"], asked=list(told["faults"]))

    @property
    def folder(self) -> Path:
        return Path(self.told["folder"])


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stand:
    made = Stand()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(runner, "run_drill", made)
    return made


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a job of the user's."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "jobs" / "my_drilled_job.py"
    file.parent.mkdir()
    file.write_text(
        "from recovery.drill.jobs.drill_job import DrillJob\n"
        "def build(spark, backend, folder): ...\n"
        "def truth(folder): return []\n"
        "JOB = DrillJob(name='mine', build=build, truth=truth)\n"
    )
    monkeypatch.delitem(sys.modules, "my_drilled_job", raising=False)
    return file


# --- list -----------------------------------------------------------------------------------------


def test_list_tells_every_job_and_every_fault_with_its_promise_and_needs() -> None:
    lines = drill("list").stdout.splitlines()
    for name, job in BUNDLED.items():
        assert lines[lines.index(name) + 1] == f"  {job.summary}"
    for name, fault in ALL.items():
        needs = f"  (needs {', '.join(sorted(fault.needs))})" if fault.needs else ""
        place = lines.index(name + needs)
        assert lines[place + 1 : place + 3] == [
            f"  {fault.summary}",
            f"  Promised: {fault.promise}",
        ]


def test_list_as_json_has_the_same() -> None:
    answer = json.loads(drill("list", "--json").stdout)
    assert answer["format"] == 1
    assert [job["name"] for job in answer["jobs"]] == list(BUNDLED)
    by_name = {fault.pop("name"): fault for fault in answer["faults"]}
    assert by_name == {
        name: {
            "summary": fault.summary,
            "promise": fault.promise,
            "needs": sorted(fault.needs),
        }
        for name, fault in ALL.items()
    }


# --- run: what reaches the drill ------------------------------------------------------------------


def test_without_arguments_the_first_bundled_job_runs_without_faults(stand: Stand) -> None:
    drill("run")
    told = dict(stand.told)
    assert callable(told.pop("on_progress"))
    assert callable(told.pop("progress"))
    assert 0 <= told.pop("seed") < 2**31
    del told["folder"]
    assert told == {
        "job": next(iter(BUNDLED)),
        "truth": None,
        "faults": (),
        "at_epoch": None,
        "duration_s": None,
        "cluster": "local-cluster[2,1,1024]",
        "store": "file",
        "commit": "sync",
        "parallelism": None,
    }


def test_every_option_reaches_the_drill_and_the_command_that_replays_it(stand: Stand) -> None:
    options = ["--faults", f"{FAULT}, driver-killed", "--at-epoch", "3", "--for", "1h30m"]
    options += ["--seed", "9", "--cluster", "two-hosts", "--store", "s3", "--commit", "async"]
    done = drill("run", "timers", *options, "--parallelism", "2", "--json", status=1)
    first = dict(stand.told)
    assert (first["job"], first["faults"]) == ("timers", (FAULT, "driver-killed"))
    assert (first["duration_s"], first["at_epoch"], first["seed"]) == (5400.0, 3, 9)
    assert (first["cluster"], first["store"], first["commit"]) == ("two-hosts", "s3", "async")
    command = shlex.split(json.loads(done.stdout)["report"]["command"])
    assert command[:2] == ["statebackend", "drill"]
    drill(*command[2:], status=1)
    changing = {"on_progress", "progress", "folder"}
    assert {n: v for n, v in stand.told.items() if n not in changing} == {
        n: v for n, v in first.items() if n not in changing
    }


@pytest.mark.parametrize(
    ("text", "duration_s"), [("90", 90.0), ("90s", 90.0), ("5m", 300.0), ("1.5h", 5400.0)]
)
def test_spans_of_time_are_typed_with_a_unit(stand: Stand, text: str, duration_s: float) -> None:
    drill("run", "--for", text)
    assert stand.told["duration_s"] == duration_s


def test_a_function_of_a_file_runs_with_its_truth_beside_it(stand: Stand, job_file: Path) -> None:
    drill("run", f"{job_file}:build", "--truth", "truth")
    build, truth = stand.told["job"], stand.told["truth"]
    assert (build.__module__, build.__name__) == ("my_drilled_job", "build")
    assert (truth.__module__, truth.__name__) == ("my_drilled_job", "truth")
    assert build.__module__ in sys.modules  # as a driver's process will import it


def test_a_module_s_drill_job_brings_its_own_truth(stand: Stand, job_file: Path) -> None:
    sys.path.insert(0, str(job_file.parent))
    drill("run", "my_drilled_job:JOB")
    assert stand.told["job"].name == "mine"
    assert stand.told["truth"] is None


# --- run: what is typed wrongly -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--faults", "executor-kiled"], "Did you mean 'executor-killed'"),
        (["running-total"], "Did you mean 'running-totals'"),
        (["zzzz"], "`statebackend drill list` shows all."),
        (["--for", "5 minutes"], "Write it like 90s, 5m or 1h30m."),
        (["--for", "0s"], "is no span of time"),
        (["--faults", "credentials-expired"], "it needs store='s3'"),
        (["nowhere/job.py:build"], "There is no file"),
        (["no_such_module_here:build"], "No module named 'no_such_module_here'"),
        (["json:dump_s", "--truth", "dumps"], "Did you mean 'dumps'"),
        (["json:dumps"], "Give --truth, or name a DrillJob."),
    ],
)
def test_what_was_typed_wrongly_is_told_with_what_was_meant(
    stand: Stand, args: list[str], told: str
) -> None:
    done = drill("run", *args, status=2)
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not stand.told


def test_a_file_that_another_module_hides_is_not_taken_for_it(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "json.py").write_text("def build(): ...\n")
    done = drill("run", f"{tmp_path}/json.py:build", "--truth", "build", status=2)
    assert "hidden by another module of the name 'json'" in done.stderr


def test_a_wrong_name_is_told_in_json_too(stand: Stand) -> None:
    answer = json.loads(drill("run", "zzzz", "--json", status=2).stdout)
    assert answer["error"]["what"] == "There is no job 'zzzz'."


# --- run: what comes of it ------------------------------------------------------------------------


def test_an_exact_drill_ends_with_0_and_the_report_on_standard_output(stand: Stand) -> None:
    done = drill("run", "--faults", FAULT)
    assert done.stdout.startswith("Exact: 4,043 rows, none lost, duplicated or wrong.\n\ntotals, ")
    assert f"--seed {stand.told['seed']}" in done.stdout.splitlines()[-1]


def test_progress_and_how_to_replay_go_to_standard_error(stand: Stand) -> None:
    done = drill("run", "--json")
    assert "   1.2 s  [1] epoch 0 committed\n" in done.stderr
    assert (
        f"replay: statebackend drill run running-totals --seed {stand.told['seed']}" in done.stderr
    )
    assert json.loads(done.stdout)["ok"] is True


def test_rows_that_differ_end_with_1(stand: Stand) -> None:
    stand.report = full_report(verdict=LOSSES)
    answer = json.loads(drill("run", "--json", status=1).stdout)
    assert answer["ok"] is False
    assert answer["report"]["verdict"]["lost"] == 2


def test_a_fault_that_could_not_be_made_ends_with_1_unless_that_is_allowed(stand: Stand) -> None:
    stand.report = full_report(
        faults=[Struck(fault=FAULT, at_s=1.0, at_epoch=1, skipped="no executor")]
    )
    done = drill("run", "--faults", FAULT, status=1)
    assert f"The fault {FAULT} was asked for and not made: no executor." in done.stderr
    answer = json.loads(drill("run", "--faults", FAULT, "--lenient", "--json").stdout)
    assert (answer["ok"], answer["not_struck"]) == (True, {FAULT: "no executor"})


def test_a_soak_in_which_nothing_struck_shows_nothing(stand: Stand) -> None:
    stand.report = full_report(faults=[])
    done = drill("run", "--for", "10s", status=1)
    assert "no fault was made in the time that there was" in done.stderr


def test_a_drill_that_cannot_run_ends_with_2(stand: Stand) -> None:
    def fail() -> None:
        raise DrillError("There is no Java.", todo="Install it.")

    stand.before = fail
    done = drill("run", status=2)
    assert "There is no Java. Install it." in done.stderr
    assert f"kept: {stand.folder}" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_drill_ends_with_130_and_leaves_nothing(
    stand: Stand, number: signal.Signals
) -> None:
    stand.before = lambda: os.kill(os.getpid(), number)
    handler = signal.getsignal(signal.SIGTERM)
    done = drill("run", status=130)
    assert "Interrupted" in done.stderr
    assert not stand.folder.exists()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_reports_are_written_into_their_folder(stand: Stand, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "reports"
    drill("run", "--report", str(folder), "--seed", "5")
    kept = msgspec.json.decode((folder / "report.json").read_bytes(), type=DrillReport)
    assert (kept.seed, kept.command) == (5, "statebackend drill run running-totals --seed 5")
    assert "<h1>✓ Exact" in (folder / "report.html").read_text()


def test_a_report_that_could_not_be_drawn_is_told_before_the_drill(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    done = drill("run", "--report", str(tmp_path), status=2)
    assert "pip install '.[drill]'" in done.stderr
    assert not stand.told


def test_the_drill_s_folder_goes_unless_it_is_asked_for_or_shows_something(
    stand: Stand, tmp_path: Path
) -> None:
    drill("run")
    assert not stand.folder.exists()
    done = drill("run", "--keep", str(tmp_path / "kept"))
    assert stand.folder == tmp_path / "kept"
    assert (stand.folder / "driver.log").exists()
    assert f"kept: {stand.folder}" in done.stderr
    stand.report = full_report(verdict=LOSSES)
    done = drill("run", status=1)
    assert (stand.folder / "driver.log").exists()
    assert f"kept: {stand.folder}" in done.stderr
