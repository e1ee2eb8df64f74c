"""Which errors of a call into Spark's JVM mean that it is gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark import SparkContext

from statebackend.errors import SparkLostError
from statebackend.operators.errors import lost_jvm as jvm


def lost() -> NoReturn:
    raise Py4JNetworkError("Connection refused")


def context(stopped: Any) -> Any:
    """A SparkContext whose JVM says so."""
    return SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=stopped)))


# py4j's words for a name that is not there, and for a call during which the JVM ended.
NO_TRACE = ["Foo does not exist in the JVM", "An error occurred while calling o1.collect"]


@pytest.mark.parametrize("said", NO_TRACE)
def test_an_error_without_a_trace_is_itself_while_spark_answers(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setattr(SparkContext, "_active_spark_context", context(lambda: False))
    with pytest.raises(Py4JError, match=said), jvm.calls():
        raise Py4JError(said)


@pytest.mark.parametrize("said", NO_TRACE)
@pytest.mark.parametrize("stopped", [lambda: True, lost])
def test_once_spark_is_gone_that_is_what_is_said(
    monkeypatch: pytest.MonkeyPatch, said: str, stopped: Any
) -> None:
    monkeypatch.setattr(SparkContext, "_active_spark_context", context(stopped))
    with pytest.raises(SparkLostError), jvm.calls():
        raise Py4JError(said)
