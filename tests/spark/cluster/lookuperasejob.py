"""A driver of its own on two executors: lookups and erasing, over TLS, asynchronous, on S3."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

from pyspark.cloudpickle import register_pickle_by_value
from pyspark.sql import SparkSession

from recovery.drill.cluster.local_cluster import SHORT_LIVED
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.stores_by_uri import open_store
from statebackend import system
from statebackend.errors import JobRunningError
from statebackend.tables import state_lookup as lookup
from tests.continuous.runtime.world import soon
from tests.spark.local import processors
from tests.spark.local.world import World
from tests.tables.erased_jobs import holding

GONE = "k1"
BOUND_S = 300.0
KEY_BYTES = len(GONE).to_bytes(4, "big") + GONE.encode()  # as it stands in keys


class Lookups:
    """Asks for all keys, and compares with the truth of the input."""

    def __init__(self, world: World, backend: Any) -> None:
        self.world, self.backend = world, backend

    def truth(self) -> dict[str, tuple[int, int]]:
        return {key: (len(ids), sum(ids)) for key, ids in self.world.input.ids().items()}

    def agree(self, **instead: Any) -> bool:
        """Whether workers alone answer, with the newest of all keys."""
        wanted = {**self.truth(), **instead}
        with mock.patch.object(lookup, "fetch_subtask", wraps=lookup.fetch_subtask) as fetched:
            found = self.backend.lookup_all("ledger", "acc", sorted(wanted))
        return found == [wanted[key] for key in sorted(wanted)] and not fetched.call_count


def started(world: World, backend: Any) -> Any:
    writer = world.writer(world.ledger(backend), backend.checked(world.sink))
    return backend.start(writer.trigger(processingTime="0 seconds"))


def main(master: str, root: Path, uri: str, endpoint: str, ca_bundle: str) -> None:
    register_pickle_by_value(processors)
    spark = (
        SparkSession.builder.master(master)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", SHORT_LIVED)
        .config("spark.executor.extraJavaOptions", SHORT_LIVED)
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    world = World(spark, root / "world")
    s3 = {"s3_endpoint": endpoint, "s3_region": "us-east-1", "s3_ca_bundle": ca_bundle}
    settings = {**s3, "tls": True, "commit": "async", "retain_epochs": 3}
    world.input.add_batches(2)
    backend = world.backend(uri=uri, settings=settings)
    query = started(world, backend)
    soon(lambda: len(world.committed()) >= 2, BOUND_S)
    asked = Lookups(world, backend)
    backend.lookup("ledger", "acc", GONE)  # workers hear with the next batch that there are any
    world.input.add_batches(1)
    soon(asked.agree, BOUND_S)
    try:
        backend.erase("ledger", [GONE])
    except JobRunningError:
        pass
    else:
        raise AssertionError("a running query's keys were erased")
    query.stop()

    options = StoreOptions(endpoint_url=endpoint, region="us-east-1", ca_bundle=ca_bundle)
    store = open_store(f"{uri}/default", new_id=system.new_id, options=options)
    assert holding(store, KEY_BYTES)
    report = backend.erase("ledger", [GONE])
    assert report.entries["acc"] == 1, report
    assert not holding(store, KEY_BYTES)
    before = asked.truth().pop(GONE)

    batches = len(world.committed()) + 1
    query = started(world, backend)
    (row,) = world.input.add_keys(GONE)
    soon(lambda: len(world.committed()) >= batches, BOUND_S)
    soon(lambda: asked.agree(**{GONE: (1, row["id"])}), BOUND_S)
    assert backend.lookup("ledger", "acc", GONE) != before
    query.stop()
    spark.stop()
    print("exact")


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
    except BaseException:  # the executors' end fills standard error after it
        traceback.print_exc(file=sys.stdout)
        raise
