"""Finds out by one small job whether Spark's Python workers have this package."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import ClassVar, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from statebackend.errors import EnvironmentMissingError
from statebackend.operators.errors import lost_jvm as jvm

__all__ = ["check_workers"]

_MISSING: Final = re.compile(r"No module named '(statebackend|snapshot|recovery)\b")


class _Probed:
    applications: ClassVar[set[str]] = set()


def _interpreter(_: Iterable[int]) -> Iterator[str]:
    """Runs in a worker, which must import this module to find it."""
    yield sys.executable


def check_workers(spark: SparkSession) -> None:
    """Refuse a start whose tasks would find no such package; asked once in an application.

    Only where Spark runs in local mode, with another interpreter than the driver's. In a cluster a
    job may have to wait for executors, and ``start()`` does not.

    Raises:
        EnvironmentMissingError: naming the interpreter.
        SparkLostError: Spark's JVM is gone.
    """
    context = spark.sparkContext
    with jvm.calls():
        application = str(context.applicationId)
        local = bool(context._jsc.sc().isLocal())
    if application in _Probed.applications or not local or _is_this(context.pythonExec):
        return
    try:
        with jvm.calls():
            context.parallelize([0], 1).mapPartitions(_interpreter).collect()
    except (PySparkException, Py4JJavaError) as error:
        if _MISSING.search(str(error)) is None:
            return  # the query itself says what it is
        raise EnvironmentMissingError(
            f"Spark's Python workers run {context.pythonExec}, which has no package statebackend; "
            f"the driver runs {sys.executable}.",
            todo="Install the package for that interpreter on every executor, or set "
            "PYSPARK_PYTHON to one that has it before the session is made.",
        ) from None
    _Probed.applications.add(application)


def _is_this(command: str) -> bool:
    found = shutil.which(command)
    return found is not None and os.path.dirname(found) == os.path.dirname(sys.executable)
