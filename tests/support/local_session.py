"""A session of two local slots, as the tests use it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from recovery.drill.cluster.local_cluster import SHORT_LIVED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["local_session"]


def local_session(scratch: Path, settings: dict[str, str]) -> SparkSession:
    """Begin it.

    Args:
        scratch: a folder for Spark's own files. settings: more of them, by key.
    """
    from pyspark.sql import SparkSession

    # Before the JVM starts: the workers must run this very interpreter, with these credentials.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    builder = (
        SparkSession.builder.master("local[2]")
        .appName("statebackend-tests")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", SHORT_LIVED)
        .config("spark.local.dir", str(scratch / "local"))
        .config("spark.log.level", "ERROR")
        .config("spark.shuffle.reduceLocality.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.sql.warehouse.dir", str(scratch / "warehouse"))
        .config("spark.sql.ui.retainedExecutions", "10")  # its heap serves thousands of queries
        .config("spark.ui.enabled", "false")
        .config("spark.ui.retainedJobs", "10")
        .config("spark.ui.retainedStages", "10")
        .config("spark.ui.showConsoleProgress", "false")
    )
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
