"""No module imports itself by way of others, in functions and for the type checker either."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("statebackend", "snapshot", "recovery")
# The face of a package looks its names up when they are used; what it says for the type checker
# alone is no way from one module to another.
FACES = frozenset({"statebackend", "snapshot", "recovery", "recovery.drill"})


def _name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(tree: ast.AST, modules: frozenset[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else node.module


def _graph() -> dict[str, frozenset[str]]:
    paths = {_name_of(path): path for top in PACKAGES for path in (ROOT / top).rglob("*.py")}
    modules = frozenset(paths)
    return {
        name: frozenset(_imported(ast.parse(path.read_text()), modules)) & (modules - {name})
        for name, path in paths.items()
        if name not in FACES
    }


def _circles(graph: dict[str, frozenset[str]]) -> list[tuple[str, ...]]:
    """Groups of modules that reach each other."""
    reach: dict[str, set[str]] = {name: set() for name in graph}
    for start in graph:
        ahead = [start]
        while ahead:
            for one in graph.get(ahead.pop(), frozenset()):
                if one not in reach[start]:
                    reach[start].add(one)
                    ahead.append(one)
    inside = {name for name in graph if name in reach[name]}
    return sorted(
        {tuple(sorted(o for o in inside if o in reach[n] and n in reach[o])) for n in inside}
    )


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert _circles(_graph()) == []


def test_a_circle_is_seen() -> None:
    graph = {"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("b"), "d": frozenset("a")}
    assert _circles(graph) == [("b", "c")]
