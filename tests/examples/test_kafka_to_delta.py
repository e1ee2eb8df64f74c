"""The example from Kafka to Delta: its configuration for Kubernetes, and a run against a broker."""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

from examples.kafka_to_delta import job
from statebackend.settings import Settings, check_keys
from tests.continuous.kafka.conftest import *  # noqa: F403  (the fixture `client`)
from tests.continuous.runtime.world import soon

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.kafkaclient import KafkaClient

FOLDER = Path(job.__file__).parent
CLASSES = {
    "spark-kubernetes": "org/apache/spark/deploy/k8s/",
    "spark-core": "org/apache/spark/internal/config/",
}
OF_A_NAME = (  # the user's names follow
    "spark.kubernetes.driverEnv.",
    "spark.executorEnv.",
    "spark.kubernetes.driver.secretKeyRef.",
    "spark.kubernetes.executor.secretKeyRef.",
    "spark.kubernetes.driver.annotation.",
)
VOLUMES = "spark.kubernetes.executor.volumes."


def conf() -> dict[str, str]:
    lines = (FOLDER / "kubernetes.conf").read_text().splitlines()
    pairs = (line.split(None, 1) for line in lines if line and not line.startswith("#"))
    return {key: value.strip() for key, value in pairs}


@pytest.fixture(scope="module")
def constants() -> bytes:
    """The classes in which Spark declares its keys."""
    found = b""
    for jar, folder in CLASSES.items():
        (path,) = (Path(pyspark.__file__).parent / "jars").glob(f"{jar}_*.jar")
        with zipfile.ZipFile(path) as classes:
            names = [name for name in classes.namelist() if name.startswith(folder)]
            found += b"".join(map(classes.read, names))
    return found


def has(constants: bytes, text: str) -> bool:
    """Whether a string stands in a class, whole: one of the format's constants of text."""
    encoded = text.encode()
    return b"\x01" + len(encoded).to_bytes(2, "big") + encoded in constants


def known(constants: bytes, key: str) -> bool:
    if has(constants, key):
        return True
    if key.startswith(VOLUMES):
        kind, _, rest = key.removeprefix(VOLUMES).split(".", 2)
        return all(has(constants, one) for one in (VOLUMES, kind, rest))
    if key.startswith(OF_A_NAME):
        return any(has(constants, one) for one in OF_A_NAME if key.startswith(one)) or (
            key.startswith("spark.executorEnv.")  # declared by SparkConf itself
        )
    start, _, name = key.rpartition(".")
    return has(constants, start) and any(has(constants, f"{by}{name}") for by in ("", ".", "\1."))


def test_every_key_for_kubernetes_is_one_that_spark_or_this_library_knows(
    constants: bytes,
) -> None:
    given = conf()
    ours = {key for key in given if key.startswith("spark.statebackend.")}
    assert [key for key in given if key not in ours and not known(constants, key)] == []
    check_keys(ours)
    settings = Settings.resolve({}, given.get)
    assert (settings.driver_port, settings.metrics_port, settings.tls) == (7080, 9464, 1)
    assert not known(constants, VOLUMES + "persistentVolumeClaim.state.mount.paths")
    assert not known(constants, "spark.kubernetes.driver.reusePersistentVolumeClaims")


def test_the_local_copies_lie_on_a_volume_that_a_new_executor_takes_over() -> None:
    given = conf()
    volume = f"{VOLUMES}persistentVolumeClaim.state."
    assert given["spark.statebackend.localDir"].startswith(given[f"{volume}mount.path"] + "/")
    assert given[f"{volume}options.claimName"] == "OnDemand"
    assert given["spark.kubernetes.driver.reusePersistentVolumeClaim"] == "true"


def test_there_is_a_slot_for_each_subtask() -> None:
    given = conf()
    slots = int(given["spark.executor.instances"]) * int(given["spark.executor.cores"])
    assert slots == 4  # as `job.start` has it


@pytest.mark.kafka
def test_clicks_come_into_the_table(
    spark: SparkSession, client: KafkaClient, tmp_path: Path
) -> None:
    from deltalake import DeltaTable

    from statebackend import StateBackend

    topic, table = client.topic(3), str(tmp_path / "counts")
    users = [f"u{n % 7}" for n in range(50)]
    for n, user in enumerate(users):
        client._producer.produce(topic, json.dumps({"user": user, "ms": n}).encode(), user)
    assert not client._producer.flush(60)
    backend = StateBackend(
        spark, uri=tmp_path.as_uri(), job="clicks", local_dir=str(tmp_path / "local")
    )
    query = job.start(backend, client.servers, topic, table, parallelism=2)

    def newest() -> dict[str, int]:
        """The largest count of each user: a row comes for each call, not for each click."""
        found: dict[str, int] = {}
        for row in DeltaTable(table).to_pyarrow_table().to_pylist() if made() else []:
            found[row["user"]] = max(row["n"], found.get(row["user"], 0))
        return found

    def made() -> bool:
        return DeltaTable.is_deltatable(table)

    try:
        soon(lambda: newest() == Counter(users), timeout_s=120)
    finally:
        query.stop()
