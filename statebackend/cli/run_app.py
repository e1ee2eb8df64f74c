"""Runs a PySpark program that may not be touched, with its state kept here."""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from statebackend.drop_in import install, installed

__all__ = ["run_app"]


def run_app(path: Path, arguments: Sequence[str], **given: Any) -> None:
    """Run a program as Python would; each session that it makes is installed in.

    Args:
        path: the program. arguments: what it sees in ``sys.argv`` after its name.
        given: the arguments of `install`.
    """
    builder = SparkSession.Builder
    spark_method = builder.getOrCreate

    @functools.wraps(spark_method)
    def get_or_create(self: Any) -> SparkSession:
        session = spark_method(self)
        if installed(session) is None:
            install(session, **given)
        return session

    builder.getOrCreate = get_or_create  # type: ignore[method-assign]
    sys.argv = [str(path), *arguments]
    sys.path[0] = str(path.parent)
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        builder.getOrCreate = spark_method  # type: ignore[method-assign]
