"""Checks that no page of the built site loads anything from elsewhere: `python docs/check_site.py .tox/site`."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

LOADS = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
ELSEWHERE = re.compile(r"(?:https?:)?//")
IN_STYLES = re.compile(r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')]+)")


class Loads(HTMLParser):
    """What a page loads by itself: not its links, which a reader has to follow."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get(LOADS.get(tag, "")) or ""
        if ELSEWHERE.match(address) and given.get("rel") != "canonical":
            self.found.append(f"<{tag}> {address}")


def loads_of(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".css":
        return IN_STYLES.findall(text)
    parser = Loads()
    parser.feed(text)
    # Material fetches Mermaid from a content delivery network when a page has a diagram.
    diagrams = ["a Mermaid diagram"] if 'class="mermaid"' in text else []
    return parser.found + IN_STYLES.findall(text) + diagrams


def main(site: Path) -> int:
    pages = [page for end in ("*.html", "*.css") for page in site.rglob(end)]
    found = [f"{page.relative_to(site)}: {load}" for page in pages for load in loads_of(page)]
    print(*found, f"{len(pages)} files, {len(found)} loads from elsewhere", sep="\n")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
