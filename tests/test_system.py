"""What the edge towards the machine does to this process."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from statebackend import system


def test_what_is_loaded_is_left_alone_by_the_collector_from_then_on() -> None:
    try:
        system.keep_loaded("a test's own")
        kept = gc.get_freeze_count()
        assert kept > 10_000, "this process's modules"
        later = [[number] for number in range(1_000)]
        system.keep_loaded("a test's own")
        assert gc.get_freeze_count() <= kept, "once"
        assert any(one is later for one in gc.get_objects()), "what is new is looked at"
    finally:
        gc.unfreeze()


def test_a_warning_is_at_the_users_line() -> None:
    inside: dict[str, Any] = {"warn": system.warn}
    code = "def outer(): inner()\ndef inner(): warn('so it is')"
    exec(compile(code, f"{system.OWN_CODE[0]}any.py", "exec"), inside)
    with pytest.warns(UserWarning, match="so it is") as caught:
        inside["outer"]()
    assert caught[0].filename == __file__
