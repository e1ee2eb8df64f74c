"""The page about state by the column: its code runs, its tests pass, its mistakes say so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from statebackend import ArrowContext, ArrowProcessor, ProcessorTester

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "howto" / "columns.md").read_text()
SECTION = TEXT.partition("## Mistakes")[2].partition("\n## ")[0]
MISTAKES = re.findall(
    r"^\| `([^`]+)`(?: \(returned\))? \| (?:`(SB\d{4})` )?([^|]+) \|", SECTION, re.M
)


def test_the_pages_processors_pass_the_pages_tests() -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    # The frames need a session; what they are made of does not.
    code = re.sub(r"^frame = backend\..*?^\)\n", "", "\n".join(blocks), flags=re.DOTALL | re.M)
    page: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "columns.md", "exec"), page)
    tests = [name for name in page if name.startswith("test_")]
    assert len(tests) == 2
    for name in tests:
        page[name]()


class Mistaken(ArrowProcessor):
    def __init__(self, code: str) -> None:
        self.code = code

    def open(self, ctx: ArrowContext) -> None:
        self.s = ctx.value_state("s", "n bigint")

    def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> Any:
        v = batch.column("v").to_numpy()
        names = {"np": np, "s": self.s, "keys": ctx.keys, "ctx": ctx, "batch": batch, "v": v}
        return eval(self.code, names)

    def on_timers(self, keys: Any, at_ms: Any, ctx: ArrowContext) -> None:
        return None


@pytest.mark.parametrize(("code", "error", "said"), MISTAKES)
def test_mistakes_say_what_the_page_says(code: str, error: str, said: str) -> None:
    table = pa.table({"user": ["a", "b", "a"], "v": [1, -1, 2], "w": pa.array([1, None, 2])})
    output = "user string, n bigint"
    with ProcessorTester(
        Mistaken(code), timeMode="ProcessingTime", keySchema="user string", outputSchema=output
    ) as tester:
        with pytest.raises(Exception, match=re.escape(said)) as caught:
            tester.testBatch(table)
        assert str(caught.value).startswith(f"[{error}]" if error else "")


def test_all_mistakes_were_found_on_the_page() -> None:
    assert len(MISTAKES) == 12


def test_the_examples_on_the_page_are_there_and_tested() -> None:
    names = re.findall(r"^\| `examples/(\w+)\.py` \|", TEXT, re.M)
    files = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"__init__", "local"}
    assert set(names) == files
    for name in names:
        assert (ROOT / "tests" / "examples" / f"test_{name}.py").exists()
        assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 150
