"""The page about processors: its code runs, and its own test passes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "write-a-processor.md"


def test_the_pages_processors_pass_the_pages_test() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    # The frames need a session; what they are made of does not.
    code = re.sub(r"^frame = backend\..*?^\)\n", "", "\n".join(blocks), flags=re.DOTALL | re.M)
    page: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec"), page)
    assert {"Sessions", "Enriched"} <= page.keys()
    page["test_a_session_ends_after_half_an_hour"]()
