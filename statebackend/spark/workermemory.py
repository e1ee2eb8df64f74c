"""What Spark's settings say of the memory of Python workers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pyspark.sql import SparkSession

from statebackend.rocks.memory import CACHE_MAX_BYTES

__all__ = ["WorkerMemory", "worker_memory"]

_OVERHEAD_FACTOR: Final = 0.1
_OVERHEAD_MIN_BYTES: Final = 384 << 20  # both as Spark has them
_SHARE: Final = 2  # of what is left for an executor's workers: a half, at most, for their caches


@dataclass(frozen=True)
class WorkerMemory:
    """How many ``workers`` of an executor share its memory, and how large each's cache may be."""

    workers: int = 1
    cache_max_bytes: int = CACHE_MAX_BYTES


def worker_memory(spark: SparkSession) -> WorkerMemory:
    """By the session's master and settings.

    In local mode the host is the limit. Elsewhere it is what an executor has beside the JVM
    (``spark.executor.pyspark.memory``, else ``spark.executor.memoryOverhead``): some cluster
    managers kill an executor that has more, and the host's memory does not say so.
    """
    context = spark.sparkContext
    if re.match(r"local(\[|$)", context.master or ""):
        return WorkerMemory(context.defaultParallelism)
    conf = context.getConf()
    jvm = context._jvm
    assert jvm is not None
    # "2g", "512m", "1024": a number alone is in MiB.
    to_mib: Callable[[str], int] = jvm.org.apache.spark.network.util.JavaUtils.byteStringAsMb

    def size_of(key: str) -> int | None:
        value = conf.get(key)
        return None if value is None else int(to_mib(value)) << 20

    own = size_of("spark.executor.pyspark.memory")
    if own is None:
        own = size_of("spark.executor.memoryOverhead")
    if own is None:
        heap = size_of("spark.executor.memory") or 1 << 30
        factor = float(conf.get("spark.executor.memoryOverheadFactor") or _OVERHEAD_FACTOR)
        own = max(int(factor * heap), _OVERHEAD_MIN_BYTES)
    workers = int(conf.get("spark.executor.cores") or 1)
    return WorkerMemory(workers, own // _SHARE // workers)
