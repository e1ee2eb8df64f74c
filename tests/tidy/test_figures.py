"""The figures of the pages are those of bench/results."""

from __future__ import annotations

import re

import pytest

from bench.pages import BLOCKS, PAGES, ROOT, drawn

MARK = re.compile(r"<!-- figures: ([\w-]+) -->")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_the_newest_figures(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert drawn(text) == text, "run `python -m bench.pages`"


def test_only_pages_that_are_drawn_have_blocks() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    having = {str(page.relative_to(ROOT)) for page in pages if MARK.search(page.read_text())}
    assert having == set(PAGES)


def test_each_block_stands_on_the_page_of_performance() -> None:
    text = (ROOT / "docs" / "quality" / "performance.md").read_text(encoding="utf-8")
    assert sorted(MARK.findall(text)) == sorted(BLOCKS)
