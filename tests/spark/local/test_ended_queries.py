"""A driver that runs many queries, one after the other, keeps nothing of those that have ended."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

from statebackend.runtime.driver.services import Services

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.spark.local.world import World


def test_a_query_that_has_ended_is_let_go_at_the_next_start(
    make_world: Callable[..., World],
) -> None:
    first, second = make_world("first"), make_world("second")
    first.input.add_batches(1)
    backend = first.run_ledger()
    assert backend._newest is not None
    launch, uri = weakref.ref(backend._newest.launch), backend._known_job().store.uri
    first.backends.clear()
    del backend

    second.input.add_batches(1)
    second.run_ledger()
    gc.collect()
    assert launch() is None, "with it go its frames, and their plans in Spark's JVM"
    assert Services.running[uri].query is None
