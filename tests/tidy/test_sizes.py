"""Ratchets: modules and functions stay small enough to be read in one go. Only ever lower these."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("statebackend", "snapshot", "recovery")
MODULE_LINES_MAX = 460
FUNCTION_LINES_MAX = 60

TEST_LINES_MAX = 500

TESTS = sorted((ROOT / "tests").rglob("*.py"))
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_are_modules_to_measure() -> None:
    assert MODULES


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_no_module_is_too_long(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MODULE_LINES_MAX, f"{_name(path)} has {lines} lines: split it by role"


@pytest.mark.parametrize("path", TESTS, ids=_name)
def test_no_file_of_tests_is_too_long(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= TEST_LINES_MAX, f"{_name(path)} has {lines} lines: split it by what it is about"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_no_function_is_too_long(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    too_long = [
        f"{_name(path)}:{node.lineno} {node.name}: {lines} lines"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert not too_long
