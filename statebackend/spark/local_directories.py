"""Where local copies of state lie if nobody says it, as far as the driver knows it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from pyspark.sql import SparkSession

from statebackend.operators.errors import lost_jvm as jvm
from statebackend.system import default_local_dir, expanded, warn

__all__ = ["local_mode_folder", "short_lived", "warn_if_short_lived"]

_LOCAL_DIR: Final = "spark.local.dir"
# Kubernetes: Spark takes volumes of such a name for its local directories.
_VOLUME: Final = re.compile(
    r"spark\.kubernetes\.executor\.volumes\.(\w+)\.spark-local-dir-[^.]+\.mount\.path"
)
_warned: Final[set[str]] = set()  # applications


def warn_if_short_lived(spark: SparkSession) -> None:
    """Say once in an application that its executors' default directory does not outlive them."""
    context = spark.sparkContext
    with jvm.calls():
        application, master = str(context.applicationId), str(context.master)
        why = short_lived(master, dict(context.getConf().getAll()))
    if not why or application in _warned:
        return
    _warned.add(application)
    warn(
        "local_dir is not set: local copies of state go to the first of Spark's local directories "
        f"on each executor's host, and {why}. After that, state is read from its durable copy. Set "
        "local_dir= (or spark.statebackend.localDir) to a folder on a local disk that survives "
        "restarts."
    )


def short_lived(master: str, conf: Mapping[str, str]) -> str:
    """Who removes the default directory of an executor, and when; "": it survives a restart."""
    if master.startswith("yarn"):
        return "YARN removes these when the application ends"
    if master.startswith("k8s"):
        volumes = [found[1] for key in conf if (found := _VOLUME.fullmatch(key))]
        if not volumes or "emptyDir" in volumes:
            return "Kubernetes removes these with the executor's pod"
    return ""  # a folder of ours beside Spark's own: nobody removes it


def local_mode_folder(spark: SparkSession, local_dir: str) -> str:
    """The folder of the workers of this driver, in local mode.

    Args:
        local_dir: as it was set; "" for the default. Spark tells its directories to workers only.
    """
    if local_dir:
        return expanded(local_dir)
    context = spark.sparkContext
    java: Any = context._jvm
    with jvm.calls():
        configured = context.getConf().get(_LOCAL_DIR)
        temporary = str(java.java.lang.System.getProperty("java.io.tmpdir"))
    return default_local_dir(configured or temporary)
