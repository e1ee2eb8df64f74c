"""A drill's drivers find the user's function, or the user is told why they cannot."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recovery.drill.cluster.live_processes import TOKEN
from recovery.drill.jobs.bundled_jobs import running_totals
from recovery.drill.jobs.named_functions import address_of
from recovery.drill.run.runner import run_drill
from statebackend.errors import SettingError, UsageError


def at_top(spark: Any, backend: Any, folder: Path) -> Any:
    raise NotImplementedError


def truth(folder: Path) -> list[tuple[int]]:
    raise NotImplementedError


def test_a_function_of_a_package_is_found_by_its_module() -> None:
    address = address_of(running_totals)
    assert (address.name, address.folder) == ("recovery.drill.jobs.bundled_jobs:running_totals", "")


def test_a_function_of_a_test_module_is_found_by_another_process() -> None:
    address = address_of(at_top)
    module, _, name = address.name.partition(":")
    code = (
        f"import sys; sys.path += {[*sys.path, address.folder]!r}; "
        f"import importlib; print(importlib.import_module({module!r}).{name}.__qualname__)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "at_top"


def test_a_function_of_a_script_is_found_by_its_file(tmp_path: Path) -> None:
    script = tmp_path / "my_job.py"
    script.write_text(
        "from recovery.drill.jobs.named_functions import address_of\n"
        "def build(spark, backend, folder): ...\n"
        "if __name__ == '__main__':\n"
        "    address = address_of(build)\n"
        "    print(address.name, address.folder)\n"
    )
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["my_job:build", str(tmp_path.resolve())]


def _nested() -> Callable[..., Any]:
    def build(spark: Any, backend: Any, folder: Path) -> Any: ...

    return build


@pytest.mark.parametrize("job", [_nested(), lambda *_: None, functools.partial(at_top, 1)])
def test_a_function_that_no_other_process_can_find_is_refused(job: Any) -> None:
    with pytest.raises(UsageError, match="cannot be found by another process"):
        run_drill(job, truth=truth)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"job": "no-such-job", "truth": None}, "There is no job 'no-such-job'"),
        ({"truth": None}, "needs truth="),
        ({"faults": ["no-such-fault"]}, "There is no fault 'no-such-fault'"),
        ({"store": "ftp://x"}, "The store is"),
        ({"store": "s3://bucket/x"}, "endpoint over plain HTTP"),
        ({"duration_s": 5.0}, "has no feed"),
        ({"job": "timers", "truth": None, "duration_s": 0.0}, "duration_s is"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_before_anything_starts(
    given: dict[str, Any], text: str, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"job": at_top, "truth": truth, "folder": tmp_path} | given
    with pytest.raises(SettingError, match=text):
        run_drill(arguments.pop("job"), **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(SettingError, match="not empty"):
        run_drill("timers", folder=tmp_path)
    assert (tmp_path / "precious").exists()


def test_a_script_that_runs_its_drill_when_it_is_imported_starts_no_drill_in_the_drill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TOKEN, "drill-1")
    with pytest.raises(SettingError, match="__main__"):
        run_drill("timers")
