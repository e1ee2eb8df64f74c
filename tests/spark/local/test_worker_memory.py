"""What Spark's settings leave for the caches of an executor's workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from statebackend.rocks.memory import CACHE_MAX_BYTES
from statebackend.spark.workermemory import WorkerMemory, worker_memory

MB = 1 << 20


def session(spark: SparkSession, master: str, **conf: str) -> Any:
    """With the units of Spark's own parser."""
    named = {f"spark.executor.{name.replace('_', '.')}": value for name, value in conf.items()}
    context = SimpleNamespace(
        master=master, getConf=lambda: named, _jvm=spark.sparkContext._jvm, defaultParallelism=3
    )
    return SimpleNamespace(sparkContext=context)


def test_in_local_mode_the_host_is_the_limit(spark: SparkSession) -> None:
    slots = spark.sparkContext.defaultParallelism
    assert worker_memory(spark) == WorkerMemory(slots, CACHE_MAX_BYTES)
    with_retries = session(spark, "local[3,4]", memoryOverhead="1g")
    assert worker_memory(with_retries) == WorkerMemory(3, CACHE_MAX_BYTES)


@pytest.mark.parametrize(
    "master", ["yarn", "k8s://https://h:1", "spark://h:1", "local-cluster[2,1,9]"]
)
@pytest.mark.parametrize(
    ("conf", "workers", "limit_mb"),
    [
        ({}, 1, 192),  # Spark's least overhead is 384 MB
        ({"memory": "8g", "cores": "4"}, 4, 102),
        ({"memory": "8g", "cores": "4", "memoryOverhead": "2048"}, 4, 256),
        ({"memory": "8g", "memoryOverheadFactor": "0.4"}, 1, 1638),
        ({"pyspark_memory": "4g", "memoryOverhead": "1g", "cores": "2"}, 2, 1024),
    ],
)
def test_on_a_cluster_it_is_half_of_what_an_executor_has_beside_the_jvm(
    spark: SparkSession, master: str, conf: dict[str, str], workers: int, limit_mb: int
) -> None:
    found = worker_memory(session(spark, master, **conf))
    assert found.workers == workers
    assert found.cache_max_bytes // MB == limit_mb
