"""`StateBackend.erase`: a stopped query goes on without the key, and a running one is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from statebackend.errors import JobRunningError, UsageError

if TYPE_CHECKING:
    from tests.spark.local.world import World


def test_a_query_goes_on_without_an_erased_key(world: World) -> None:
    world.input.add_batches(2)
    backend = world.backend()
    writer = world.writer(world.ledger(backend)).trigger(processingTime="0 seconds")
    query = backend.start(writer)
    query.processAllAvailable()
    with pytest.raises(JobRunningError, match="while its query runs"):
        backend.erase("ledger", ["k1"])
    query.stop()
    truth = {key: (len(ids), sum(ids)) for key, ids in world.input.ids().items()}
    assert backend.erase("ledger", ["k1"], dry_run=True).entries["acc"] == 1
    assert backend.lookup("ledger", "acc", "k1") == truth["k1"], "a dry run erases nothing"
    report = backend.erase("ledger", ["k1"])
    assert report.entries["acc"] == 1
    with pytest.raises(UsageError, match="keys= is a str"):
        backend.lookup_all("ledger", "acc", "k1")
    left = {key: value for key, value in truth.items() if key != "k1"}
    assert backend.lookup("ledger", "acc", "k1") is None
    assert backend.lookup_all("ledger", "acc", sorted(left)) == [left[key] for key in sorted(left)]
    (row,) = world.input.add_keys("k1")
    again = world.run_ledger()
    assert again.lookup("ledger", "acc", "k1") == (1, row["id"])
    assert again.lookup_all("ledger", "acc", sorted(left)) == [left[key] for key in sorted(left)]
