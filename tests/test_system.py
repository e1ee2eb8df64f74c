"""What the edge towards the machine does to this process."""

from __future__ import annotations

import gc

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
