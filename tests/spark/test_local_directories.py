"""Where local copies go if nobody says it: beside Spark's own, and where that does not last."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from statebackend import system
from statebackend.operators.errors import lost_jvm
from statebackend.spark import local_directories
from statebackend.spark.local_directories import (
    local_mode_folder,
    short_lived,
    warn_if_short_lived,
)

ID = "58c48a5e-0c2d-4ff8-9306-3af99e299dbe"
OWN = system.user_folder_name()
K8S = "spark.kubernetes.executor.volumes"


@pytest.fixture(autouse=True)
def _running(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a JVM, and nobody has said anything yet."""
    monkeypatch.setattr(lost_jvm, "_stopped", lambda: False)
    monkeypatch.setattr(local_directories, "_warned", set())
    for name in ("LOCAL_DIRS", "SPARK_LOCAL_DIRS"):
        monkeypatch.delenv(name, raising=False)


def spark(master: str, conf: dict[str, str] | None = None, application: str = "app") -> Any:
    made = MagicMock()
    context = made.sparkContext
    context.applicationId, context.master = application, master
    context.getConf().getAll.return_value = list((conf or {}).items())
    context.getConf().get.side_effect = (conf or {}).get
    context._jvm.java.lang.System.getProperty.return_value = "/tmp-of-java"
    return made


@pytest.mark.parametrize(
    ("said", "folder"),
    [
        # In local mode, and in a pod: the block manager's folder goes with the executor.
        (f"/data/blockmgr-{ID},/other/blockmgr-{ID}", "/data"),
        (f"/var/data/spark-{ID}/blockmgr-{ID}", f"/var/data/spark-{ID}"),
        # Of a standalone worker: the folder above goes with the application.
        (f"/data/spark-{ID}/executor-{ID}/blockmgr-{ID}", "/data"),
        # As a driver has it.
        ("/data/one,/data/two", "/data/one"),
        ("/data/one/, /data/two", "/data/one"),
    ],
)
def test_a_worker_takes_the_first_directory_that_outlives_its_executor(
    monkeypatch: pytest.MonkeyPatch, said: str, folder: str
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", said)
    assert system.expanded("") == f"{folder}/{OWN}"


def test_on_yarn_it_is_the_first_of_its_own_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"/disk2/blockmgr-{ID}")  # Spark shuffles the list
    monkeypatch.setenv("LOCAL_DIRS", "/disk1/appcache/application_1_2,/disk2/appcache")
    assert system.expanded("") == f"/disk1/appcache/application_1_2/{OWN}"


def test_what_was_set_is_taken_whatever_spark_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_DIRS", "/disk1")
    monkeypatch.setenv("DISK", "/disk9")
    assert system.expanded("$DISK/state") == "/disk9/state"


def test_the_driver_of_local_mode_finds_the_directory_of_its_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert local_mode_folder(spark("local[2]"), "") == f"/tmp-of-java/{OWN}"
    given = {"spark.local.dir": f"{tmp_path},/other"}
    assert local_mode_folder(spark("local[2]", given), "") == f"{tmp_path}/{OWN}"
    assert local_mode_folder(spark("local[2]", given), "/set") == "/set"
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/first")  # Spark's workers have that, too
    assert local_mode_folder(spark("local[2]", given), "") == f"/first/{OWN}"


@pytest.mark.parametrize(
    ("master", "conf", "lasts"),
    [
        ("local[2]", {}, True),
        ("spark://host:7077", {}, True),
        ("local-cluster[2,1,1024]", {}, True),
        ("yarn", {}, False),
        ("k8s://https://host", {}, False),
        ("k8s://https://host", {f"{K8S}.hostPath.spark-local-dir-1.mount.path": "/data"}, True),
        (
            "k8s://https://host",
            {f"{K8S}.persistentVolumeClaim.spark-local-dir-a.mount.path": "/data"},
            True,
        ),
        ("k8s://https://host", {f"{K8S}.emptyDir.spark-local-dir-1.mount.path": "/data"}, False),
        ("k8s://https://host", {f"{K8S}.hostPath.models.mount.path": "/models"}, False),
    ],
)
def test_what_a_cluster_manager_removes_is_known(
    master: str, conf: dict[str, str], lasts: bool
) -> None:
    assert bool(short_lived(master, conf)) is not lasts


def test_a_directory_that_does_not_last_is_worth_one_warning_in_an_application() -> None:
    with pytest.warns(UserWarning, match=r"YARN removes.*survives restarts") as caught:
        warn_if_short_lived(spark("yarn"))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_short_lived(spark("yarn"))
        warn_if_short_lived(spark("spark://host:7077", application="another"))
    with pytest.warns(UserWarning, match="YARN removes"):
        warn_if_short_lived(spark("yarn", application="a later one"))
