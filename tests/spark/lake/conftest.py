"""A session with the Spark package of a table format; of which, the installed PySpark says.

Delta's goes to PySpark 4.2, Iceberg's to 4.1: neither has one for 4.3 yet.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pyspark
import pytest

from tests.spark.local.conftest import *  # noqa: F403  (a world per test)
from tests.support.local_session import local_session
from tests.support.maven import jars_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

ICEBERG = "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.11.0"
DELTA = "io.delta:delta-spark_4.2_2.13:4.4.0"
OWN = ("hadoop-", "jackson-", "log4j-", "parquet-", "scala-", "slf4j-", "snappy-", "zstd-")


@pytest.fixture(scope="session")
def format_name() -> str:
    """Of the table format that this PySpark has a package for."""
    if not os.environ.get("STATEBACKEND_LAKE"):
        pytest.skip("needs jars: run by tox -e lake41 or lake42, which set STATEBACKEND_LAKE")
    release = ".".join(pyspark.__version__.split(".")[:2])
    if release not in ("4.1", "4.2"):
        pytest.skip(f"neither Delta nor Iceberg has a package for PySpark {release}")
    return "delta" if release == "4.2" else "iceberg"


@pytest.fixture(scope="session")
def spark(
    format_name: str, tmp_path_factory: pytest.TempPathFactory, aws_environment: None
) -> Iterator[SparkSession]:
    """Two local slots, with the package."""
    scratch = tmp_path_factory.mktemp("spark")
    found = jars_of(DELTA if format_name == "delta" else ICEBERG)
    settings = {
        "spark.jars": ",".join(str(jar) for jar in found if not jar.name.startswith(OWN)),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension"
        if format_name == "delta"
        else "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    }
    if format_name == "delta":
        name = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        settings["spark.sql.catalog.spark_catalog"] = name
    else:
        settings |= {
            "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
            "spark.sql.catalog.lake.type": "hadoop",
            "spark.sql.catalog.lake.cache-enabled": "false",  # the test reads what a query wrote
            "spark.sql.catalog.lake.warehouse": str(scratch / "lake"),
        }
    session = local_session(scratch, settings)
    yield session
    session.stop()
