"""Java is asked for early, and what is wrong with it is said in one sentence."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

from statebackend.environment import (
    java_major_version,
    require_java,
    warn_of_other_python,
)
from statebackend.errors import EnvironmentMissingError


def _java(home: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A JAVA_HOME whose java is a shell script."""
    path = home / "bin" / "java"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(home))


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('openjdk version "22-ea" 2024-03-19', 22),
        ('java version "1.8.0_392"', 8),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "11.0.2" 2019-01-15', 11),
        ("The operation couldn't be completed. Unable to locate a Java Runtime.", None),
        ("", None),
    ],
)
def test_the_major_version_is_read(text: str, version: int | None) -> None:
    assert java_major_version(text) == version


def test_a_new_enough_java_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _java(tmp_path, "echo 'openjdk version \"17.0.1\"' >&2", monkeypatch)
    require_java()


def test_java_on_the_path_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _java(tmp_path, "echo 'openjdk version \"21.0.1\"' >&2", monkeypatch)
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    require_java()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'openjdk version \"11.0.2\"' >&2", "Java 17 or later"),
        ("echo 'Unable to locate a Java Runtime.' >&2; exit 1", "Unable to locate a Java Runtime"),
        ("exit 0", "it says nothing"),
    ],
)
def test_what_cannot_run_spark_is_refused(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _java(tmp_path, script, monkeypatch)
    with pytest.raises(EnvironmentMissingError, match=said) as caught:
        require_java()
    assert str(tmp_path) in caught.value.what
    assert "JAVA_HOME" in caught.value.todo


def test_no_java_at_all_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentMissingError, match="neither a java on PATH nor a JAVA_HOME"):
        require_java()


def test_a_java_home_without_java_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(EnvironmentMissingError, match="cannot be run"):
        require_java()


def python_of(folder: Path, body: str) -> str:
    command = folder / "python-of-workers"
    command.write_text(f"#!/bin/sh\n{body}\n")
    command.chmod(0o755)
    return str(command)


def test_workers_without_the_package_are_found_out_on_the_driver(tmp_path: Path) -> None:
    command = python_of(tmp_path, f'exec {sys.executable} -S -I "$@"')  # without site-packages
    with pytest.warns(UserWarning, match=r"no package statebackend.*PYSPARK_PYTHON="):
        warn_of_other_python(command)


@pytest.mark.parametrize("body", [f'exec {sys.executable} "$@"', "exit 0"])
def test_workers_that_have_the_package_are_not_warned_of(tmp_path: Path, body: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_python(python_of(tmp_path, body))
        warn_of_other_python(sys.executable)
        warn_of_other_python("no-such-python")
