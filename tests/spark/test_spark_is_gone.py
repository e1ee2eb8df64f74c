"""A backend that is made when Spark's JVM has ended says so."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from py4j.protocol import Py4JNetworkError
from pyspark import SparkContext
from pyspark.errors import PySparkValueError
from pyspark.sql import DataFrame, SparkSession

from statebackend.backend import StateBackend
from statebackend.errors import SettingError, SparkLostError
from statebackend.spark.frames.grouped_input import key_names

if TYPE_CHECKING:
    from pathlib import Path


def session(error: Exception) -> Any:
    """One whose configuration answers with an error."""

    class Conf:
        @property
        def getAll(self) -> Any:
            raise error

    class Session(SparkSession):
        sparkContext: Any = SimpleNamespace(master="local[1]", pythonExec=sys.executable)
        conf: Any = Conf()

        def __init__(self) -> None:
            """Without a JVM."""

    return Session()


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(111, "Connection refused"),
        Py4JNetworkError("Answer from Java side is empty"),
    ],
)
def test_a_backend_that_is_made_when_the_jvm_has_ended_says_so(
    error: Exception, tmp_path: Path
) -> None:
    with pytest.raises(SparkLostError, match=r"\[SB5012\] Spark is gone from this driver"):
        StateBackend(session(error), uri=tmp_path.as_uri())


def test_another_error_of_the_configuration_is_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: Any = SimpleNamespace(
        _jsc=SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: False))
    )
    monkeypatch.setattr(SparkContext, "_active_spark_context", running)
    with pytest.raises(SettingError, match="no such key"):
        StateBackend(session(SettingError("no such key")), uri=tmp_path.as_uri())


def test_a_frame_that_is_made_when_the_jvm_has_ended_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: Any = SimpleNamespace(_jsc=None)
    monkeypatch.setattr(SparkContext, "_active_spark_context", ended)

    class Gone(DataFrame):
        def __new__(cls) -> Any:
            return object.__new__(cls)

        def __init__(self) -> None:
            """Without a JVM."""

        @property
        def columns(self) -> list[str]:
            raise PySparkValueError("Unable to parse datatype. [Errno 111] Connection refused")

    with pytest.raises(SparkLostError, match="SB5012"):
        key_names(Gone(), "k")
