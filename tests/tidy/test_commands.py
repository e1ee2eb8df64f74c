"""What the README tells people to type is what CI runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALL = "python3 -m venv .venv && .venv/bin/pip install -q tox tox-uv && .venv/bin/tox "


@pytest.mark.parametrize("command", [INSTALL + "-qe demo", INSTALL + "-e lint,tests"])
def test_the_readme_names(command: str) -> None:
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("there is no README yet")
    assert command in readme.read_text(encoding="utf-8")


def test_ci_runs_the_readme_s_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert INSTALL + "-e lint,tests" in script


def test_errors_name_extras_that_there_are_and_how_they_are_installed_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = set()
    for folder in ("statebackend", "snapshot", "recovery"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert "statebackend[" not in text, f"{path}: there is install_extra for that"
            named |= set(re.findall(r"install_extra\([\"'](\w+)", text))
    assert {"s3", "cli", "kafka", "metrics"} <= named <= project["optional-dependencies"].keys()
