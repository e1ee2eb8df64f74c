"""The pages of docs/ say what the code says, and point at files that exist."""

from __future__ import annotations

import re
import runpy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import statebackend

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATOR: dict[str, Any] = runpy.run_path(str(DOCS / "generate.py"))
GENERATED: dict[str, str] = GENERATOR["pages"]()
PAGES = sorted(DOCS.rglob("*.md")) + sorted(ROOT.glob("*.md"))
DESIGN = sorted((DOCS / "design").rglob("*.md"))
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_page_is_what_the_generator_gives(name: str) -> None:
    committed = (DOCS / name).read_text(encoding="utf-8")
    assert committed == GENERATED[name], "run `python docs/generate.py`"


def test_every_setting_stands_on_one_of_the_pages() -> None:
    groups = {**GENERATOR["USER_SETTINGS"], **GENERATOR["EXPERT_SETTINGS"]}
    named = [name for names in groups.values() for name in names]
    assert sorted(named) == sorted(GENERATOR["SETTINGS"])


def test_every_error_has_a_code_of_its_own_and_a_meaning() -> None:
    kinds = GENERATOR["error_classes"]()
    codes = [vars(kind).get("code") for kind in kinds]
    assert None not in codes
    assert len(set(codes)) == len(kinds)
    assert all(kind.__doc__ for kind in kinds)


@pytest.mark.parametrize("page", DESIGN, ids=lambda page: page.stem)
def test_a_design_page_names_modules_that_exist(page: Path) -> None:
    named = re.findall(r"`([\w/.-]+\.py)`", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_every_public_name_stands_on_a_page_of_the_api() -> None:
    pages = sorted((DOCS / "reference" / "api").glob("*.md"))
    named = re.findall(r"^::: ([\w.]+)$", "\n".join(p.read_text() for p in pages), re.MULTILINE)
    assert set(statebackend.__all__) <= {name.rpartition(".")[2] for name in named}
    for name in named:
        module, _, what = name.rpartition(".")
        kind = getattr(import_module(module), what)
        assert getattr(statebackend, what, kind) is kind


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_that_exist(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
