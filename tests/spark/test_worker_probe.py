"""Workers whose Python lacks the package are found out by one job, before a query starts."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import MagicMock

import pytest
from pyspark.errors import PythonException

from statebackend.errors import EnvironmentMissingError
from statebackend.operators.errors import lost_jvm
from statebackend.spark.start.worker_probe import check_workers


@pytest.fixture(autouse=True)
def _running(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a JVM, as far as the probe can tell."""
    monkeypatch.setattr(lost_jvm, "_stopped", lambda: False)


def _spark(application: str, python: str, says: str | None) -> Any:
    spark = MagicMock()
    context = spark.sparkContext
    context.applicationId, context.pythonExec = application, python
    context._jsc.sc().isLocal.return_value = True
    error = PythonException(says) if says is not None else None
    context.parallelize().mapPartitions().collect.side_effect = error
    context.parallelize.reset_mock()
    return spark


def test_an_interpreter_without_the_package_is_named() -> None:
    spark = _spark("a", "/bin/other", "ModuleNotFoundError: No module named 'statebackend'")
    with pytest.raises(
        EnvironmentMissingError, match=r"/bin/other, which has no package"
    ) as raised:
        check_workers(spark)
    assert raised.value.__suppress_context__


def test_what_else_a_worker_says_is_left_to_the_query() -> None:
    check_workers(_spark("b", "/bin/other", "No module named 'pandas'"))


def test_it_is_asked_once_and_not_of_the_drivers_own_interpreter() -> None:
    spark = _spark("c", "/bin/other", None)
    for _ in range(2):
        check_workers(spark)
    assert spark.sparkContext.parallelize.call_count == 1
    own = _spark("d", sys.executable, None)
    check_workers(own)
    assert own.sparkContext.parallelize.call_count == 0
