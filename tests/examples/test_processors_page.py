"""The pages about processors: their code runs, and their tests pass."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

HOWTO = Path(__file__).parents[2] / "docs" / "howto"


def _blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (HOWTO / page).read_text(), re.DOTALL)


def _run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "page", "exec"), names)
    return names


def test_the_processors_of_the_page_about_writing_them_run() -> None:
    # The frames need a session; what they are made of does not.
    code = re.sub(
        r"^frame = backend\..*?^\)\n",
        "",
        "\n".join(_blocks("write-a-processor.md")),
        flags=re.DOTALL | re.M,
    )
    assert {"Sessions", "Enriched"} <= _run(code).keys()


def test_the_tests_of_the_page_about_testing_pass() -> None:
    passed = []
    for block in _blocks("test-a-processor.md"):
        for name, test in _run(block).items():
            if name.startswith("test_"):
                test()
                passed.append(name)
    assert "test_a_session_ends_after_half_an_hour" in passed
    assert len(passed) >= 4
