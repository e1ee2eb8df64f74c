"""What the checkers have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.channels.world import World

__all__ = ["Checker", "Violation"]


class Violation(Exception):
    """Something that must never be."""

    def __init__(self, checker: str, what: str) -> None:
        super().__init__(checker, what)
        self.checker, self.what = checker, what


class Checker:
    """Looks at a world from outside."""

    name = ""

    def __init__(self, world: World) -> None:
        self.world = world

    def must(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(self.name, what)
