"""Every test and every drill that the fault atlas names exists, and no drill is missing in it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.drill.catalogue import ALL

ROOT = Path(__file__).parents[2]
ATLAS = (ROOT / "docs" / "quality" / "fault-atlas.md").read_text(encoding="utf-8")
# A path, then a test or a class of tests, then perhaps a test of that class.
NAMED = sorted(set(re.findall(r"`([\w/]+\.py::[\w:]+)`", ATLAS)))

DRILLS = sorted(set(re.findall(r"`drill run (?:[\w-]+ )?--faults ([\w-]+)`", ATLAS)))


def _names(body: list[ast.stmt], above: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield above + node.name
        elif isinstance(node, ast.ClassDef):
            yield from _names(node.body, f"{above}{node.name}::")
        elif isinstance(node, ast.Assign):  # a case that a state machine of hypothesis makes
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id.startswith("Test"):
                    yield target.id


@functools.cache
def _tests_in(path: str) -> frozenset[str]:
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    return frozenset(_names(ast.parse(file.read_text(encoding="utf-8")).body))


def test_the_atlas_names_tests() -> None:
    assert len(NAMED) > 50
    assert ATLAS.count("::test_") == len(re.findall(r"\.py::(?:\w+::)?test_\w+`", ATLAS))


@pytest.mark.parametrize("named", NAMED)
def test_a_test_of_the_atlas_exists(named: str) -> None:
    path, _, name = named.partition("::")
    assert name in _tests_in(path), f"{path} has no {name}"


@pytest.mark.parametrize("named", DRILLS)
def test_a_drill_of_the_atlas_exists(named: str) -> None:
    assert named in ALL


@pytest.mark.parametrize("name", ALL)
def test_a_fault_of_the_catalogue_is_in_the_atlas(name: str) -> None:
    assert name in DRILLS
