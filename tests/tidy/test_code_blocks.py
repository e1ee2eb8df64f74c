"""The Python on the pages parses, imports names that exist, and passes arguments that they take."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import statebackend

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md")) + sorted(ROOT.glob("*.md"))
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
OURS = ("statebackend", "snapshot", "recovery")


def blocks(page: Path) -> list[str]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [textwrap.dedent(text) for _, text in found]


WITH_BLOCKS = [page for page in PAGES if blocks(page)]


def imported(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """What a block imports of this repository: its name there, and the thing itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
            module = importlib.import_module(str(node.module))
            for one in node.names:
                yield one.asname or one.name, getattr(module, one.name)


def called(tree: ast.AST, known: dict[str, Any]) -> Iterator[tuple[ast.Call, Any]]:
    """The calls of ``Name(...)``, ``backend.name(...)`` and ``statebackend.name(...)``."""
    owners = {"backend": statebackend.StateBackend, "statebackend": statebackend}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in known:
            yield node, known[node.func.id]
        elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            owner = owners.get(node.func.value.id)
            if owner is not None:
                yield node, getattr(owner, node.func.attr)


def misfit(call: ast.Call, target: Any) -> str | None:
    """Why the arguments of ``call`` are not those of ``target``; None: they are."""
    starred = any(isinstance(one, ast.Starred) for one in call.args)
    if starred or any(one.arg is None for one in call.keywords):
        return None
    first = [] if inspect.isclass(target) or not _is_method(target) else [None]
    given = [*first, *(None for _ in call.args)]
    if any(isinstance(one, ast.Constant) and one.value is Ellipsis for one in call.args):
        return None  # ``(frame, ...)``: the rest stands elsewhere
    try:
        inspect.signature(target).bind(*given, **{str(one.arg): None for one in call.keywords})
    except TypeError as error:
        return f"{ast.unparse(call)[:80]}: {error}"
    return None


def _is_method(target: Any) -> bool:
    return getattr(statebackend.StateBackend, getattr(target, "__name__", ""), None) is target


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_block_of_python_fits_the_code(page: Path) -> None:
    trees = [ast.parse(text) for text in blocks(page)]
    known: dict[str, Any] = {}
    for tree in trees:
        known.update(imported(tree))
    wrong = [misfit(*one) for tree in trees for one in called(tree, known)]
    assert [one for one in wrong if one] == []


def test_a_wrong_name_or_argument_is_noticed() -> None:
    tree = ast.parse("backend.start(writer, go_back=3)")
    assert [misfit(*one) for one in called(tree, {})] != [None]
    with pytest.raises(AttributeError):
        list(called(ast.parse("backend.begin(writer)"), {}))
    with pytest.raises(AttributeError):
        dict(imported(ast.parse("from statebackend import Counter")))
