"""Counts clicks from Kafka, and writes each user's count into a Delta table, exactly once.

What differs between a laptop and a cluster is in Spark's configuration: see README.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from pyspark.sql import SparkSession

from statebackend import (
    ContinuousQuery,
    DeltaSink,
    ExponentialDelay,
    KafkaSource,
    KeyedProcessor,
    StateBackend,
)


class Clicks(KeyedProcessor):
    """How many clicks each user has made."""

    def open(self, ctx: Any) -> None:
        self.clicks = ctx.value_state("clicks", "n bigint")

    def process(self, key: Any, rows: Iterator[Any], ctx: Any) -> Iterator[tuple[str, int]]:
        n = (self.clicks.get() or (0,))[0] + sum(1 for _ in rows)
        self.clicks.update((n,))
        yield key[0], n


def start(
    backend: StateBackend, servers: str, topic: str, table: str, parallelism: int = 4
) -> ContinuousQuery:
    """Start the job. Its offsets, its counts and what is written are of one checkpoint."""
    clicks = KafkaSource(topic, bootstrap_servers=servers, value="json: user string, ms bigint")
    return (
        backend.continuous(clicks, name="clicks")
        .key_by("user")
        .process(Clicks(), uid="count", output_schema="user string, n bigint")
        .sink(DeltaSink(table), uid="counts")
        .start(
            parallelism=parallelism,
            checkpoint_interval="10 seconds",
            restart=ExponentialDelay(),
        )
    )


if __name__ == "__main__":
    spark = SparkSession.builder.getOrCreate()
    given = [os.environ[name] for name in ("KAFKA_SERVERS", "KAFKA_TOPIC", "DELTA_TABLE")]
    # uri= and local_dir= are keys of the session: spark.statebackend.uri, .localDir
    start(StateBackend(spark, job="clicks"), *given).awaitTermination()
