"""What every floor's tests share: hypothesis profiles and one Spark session."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support.s3 import *  # noqa: F403  (S3 servers, started when a test asks for one)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

settings.register_profile(
    "ci",
    # A fixed portion in CI: what a new draw would find belongs to whoever looks for it (dev).
    derandomize=bool(os.environ.get("CI")),
    deadline=None,
    max_examples=50,
    stateful_step_count=30,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("dev", deadline=None, max_examples=300, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(tryfirst=True)  # before xdist's own, which reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts Spark is of the full suite, but for what holds a promise of the README.

    Under xdist: Spark's tests by module, and those with processes of their own in one worker.
    """
    for item in items:
        if item.get_closest_marker("cluster"):
            group = "cluster"
        elif "spark" in getattr(item, "fixturenames", ()):
            group = item.path.name
        else:
            continue
        item.add_marker(pytest.mark.xdist_group(group))
        if not item.get_closest_marker("promise"):
            item.add_marker(pytest.mark.full)


@pytest.fixture(scope="session")
def spark(
    tmp_path_factory: pytest.TempPathFactory, aws_environment: None
) -> Iterator[SparkSession]:
    """A session of two local slots; every test shares it, none stops it."""
    from pyspark.sql import SparkSession

    from recovery.drill.cluster.local_cluster import SHORT_LIVED

    # Before the JVM starts: the workers must run this very interpreter, with these credentials.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    scratch = tmp_path_factory.mktemp("spark")
    session = (
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
        .getOrCreate()
    )
    yield session
    session.stop()
