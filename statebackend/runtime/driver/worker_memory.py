"""What Spark's settings say of the memory of Python workers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from statebackend import system
from statebackend.rocks.cache_memory import CACHE_MAX_BYTES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["WorkerMemory", "local_slots", "worker_memory"]

_OVERHEAD_FACTOR: Final = 0.1
_OVERHEAD_MIN_BYTES: Final = 384 << 20  # both as Spark has them
_BUFFERS_BYTES: Final = 256 << 20  # a worker's write buffers, and the budgets of its task
_SHARE: Final = 2  # of what is left beside them: a half for caches, at most


@dataclass(frozen=True)
class WorkerMemory:
    """How many ``workers`` of an executor share its memory, and how large each's cache may be."""

    workers: int = 1
    cache_max_bytes: int = CACHE_MAX_BYTES


def local_slots(master: str) -> int | None:
    """Tasks that run at once in local mode; None: the master is another one."""
    if master == "local":
        return 1
    found = re.fullmatch(r"local\[(\d+|\*)(?:,.*)?\]", master)
    if found is None:
        return None
    return system.cores() if found[1] == "*" else int(found[1])


def worker_memory(spark: SparkSession) -> WorkerMemory:
    """By the session's master and settings.

    On YARN and Kubernetes an executor is killed that takes more than it asked for beside the JVM
    (``spark.executor.pyspark.memory``, else ``spark.executor.memoryOverhead``), and on YARN the
    host's memory does not say so. Elsewhere the host is the limit.
    """
    context = spark.sparkContext
    master = context.master or ""
    slots = local_slots(master)
    if slots is not None:
        return WorkerMemory(slots)
    conf = context.getConf()
    cores = int(conf.get("spark.executor.cores") or 1)
    workers = max(1, cores // int(conf.get("spark.task.cpus") or 1))
    if not master.startswith(("yarn", "k8s:")):
        return WorkerMemory(workers)
    jvm = context._jvm
    assert jvm is not None
    # "2g", "512m", "1024": a number alone is in MiB.
    to_mib: Callable[[str], int] = jvm.org.apache.spark.network.util.JavaUtils.byteStringAsMb

    def size_of(key: str) -> int:
        return int(to_mib(conf.get(key) or "0")) << 20

    own = size_of("spark.executor.pyspark.memory") or size_of("spark.executor.memoryOverhead")
    if not own:
        heap = size_of("spark.executor.memory") or 1 << 30
        factor = float(conf.get("spark.executor.memoryOverheadFactor") or _OVERHEAD_FACTOR)
        own = max(int(factor * heap), _OVERHEAD_MIN_BYTES)
    return WorkerMemory(workers, max(0, own - workers * _BUFFERS_BYTES) // _SHARE // workers)
