"""A module's name says which one it is, and a folder can be read at a glance."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("statebackend", "snapshot", "recovery")
TWICE: set[str] = set()
_FILES_MAX = 20


def _modules() -> list[Path]:
    found = [path for name in PRODUCT for path in (ROOT / name).rglob("*.py")]
    return [path for path in found if not path.name.startswith("__")]


def test_no_two_modules_have_one_name() -> None:
    by_name: defaultdict[str, list[str]] = defaultdict(list)
    for path in _modules():
        by_name[path.stem].append(str(path.relative_to(ROOT)))
    assert not {
        name: paths for name, paths in by_name.items() if len(paths) > 1 and name not in TWICE
    }


@pytest.mark.parametrize("folder", sorted({path.parent for path in _modules()}), ids=str)
def test_a_folder_has_few_modules(folder: Path) -> None:
    assert sum(path.parent == folder for path in _modules()) <= _FILES_MAX


def test_every_folder_says_what_it_is() -> None:
    folders = {path.parent for path in _modules()}
    assert not [
        str(folder.relative_to(ROOT))
        for folder in folders
        if not (folder / "__init__.py").read_text(encoding="utf-8").startswith('"""')
    ]
