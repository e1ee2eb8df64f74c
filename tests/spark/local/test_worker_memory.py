"""What Spark's settings leave for the caches of an executor's workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from statebackend import system
from statebackend.rocks.cache_memory import CACHE_MAX_BYTES
from statebackend.runtime.driver.worker_memory import WorkerMemory, worker_memory

MB = 1 << 20


def session(spark: SparkSession, master: str, **conf: str) -> Any:
    """With the units of Spark's own parser."""
    named = {f"spark.executor.{name.replace('_', '.')}": value for name, value in conf.items()}
    context = SimpleNamespace(master=master, getConf=lambda: named, _jvm=spark.sparkContext._jvm)
    return SimpleNamespace(sparkContext=context)


@pytest.mark.parametrize(
    ("master", "workers"),
    [("local", 1), ("local[3]", 3), ("local[3,4]", 3), ("local[*]", system.cores())],
)
def test_in_local_mode_the_host_is_the_limit(
    spark: SparkSession, master: str, workers: int
) -> None:
    found = worker_memory(session(spark, master, memoryOverhead="1g", cores="9"))
    assert found == WorkerMemory(workers, CACHE_MAX_BYTES)


@pytest.mark.parametrize("master", ["spark://h:1", "local-cluster[2,4,900]"])
def test_so_it_is_where_nobody_ends_what_takes_more(spark: SparkSession, master: str) -> None:
    found = worker_memory(session(spark, master, cores="4", memoryOverhead="1g"))
    assert found == WorkerMemory(4, CACHE_MAX_BYTES)


@pytest.mark.parametrize("master", ["yarn", "k8s://https://h:1"])
@pytest.mark.parametrize(
    ("conf", "workers", "limit_mb"),
    [
        ({}, 1, 64),  # half of what buffers leave of Spark's least overhead, 384 MB
        ({"memory": "8g", "cores": "4"}, 4, 0),  # which leave nothing: the least cache
        ({"memory": "8g", "cores": "4", "memoryOverhead": "2048"}, 4, 128),
        ({"memory": "8g", "memoryOverheadFactor": "0.4"}, 1, 1510),
        ({"pyspark_memory": "4g", "memoryOverhead": "1g", "cores": "2"}, 2, 896),
        ({"pyspark_memory": "0", "memoryOverhead": "1g", "cores": "2"}, 2, 128),
    ],
)
def test_on_yarn_and_kubernetes_it_is_half_of_what_an_executor_has_to_spare(
    spark: SparkSession, master: str, conf: dict[str, str], workers: int, limit_mb: int
) -> None:
    found = worker_memory(session(spark, master, **conf))
    assert found.workers == workers
    assert found.cache_max_bytes // MB == limit_mb


def test_tasks_of_several_cores_are_fewer_workers(spark: SparkSession) -> None:
    found = worker_memory(session(spark, "spark://h:1", cores="8"))
    assert found.workers == 8
    of_two = session(spark, "spark://h:1", cores="8")
    of_two.sparkContext.getConf()["spark.task.cpus"] = "2"
    assert worker_memory(of_two).workers == 4
