"""Schemas as text, where Spark's parser is not there to read them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark import SparkContext
from pyspark.errors import ParseException
from pyspark.sql.types import DataType

from statebackend.errors import SchemaError, SparkLostError
from statebackend.operators.declared_states import parse_schema


def answering(
    monkeypatch: pytest.MonkeyPatch, error: Exception, *, is_stopped: bool = False
) -> None:
    """A session whose parser answers with an error."""

    def from_ddl(text: str) -> DataType:
        raise error

    context: Any = SimpleNamespace(
        _jsc=SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: is_stopped))
    )
    monkeypatch.setattr(SparkContext, "_active_spark_context", context)
    monkeypatch.setattr(DataType, "fromDDL", from_ddl)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(111, "Connection refused"),
        Py4JNetworkError("Answer from Java side is empty"),
        Py4JError("An error occurred while calling o7.parseTableSchema"),
    ],
)
def test_a_jvm_that_is_gone_is_no_mistake_in_the_schema(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    answering(monkeypatch, error, is_stopped=True)
    with pytest.raises(SparkLostError, match=r"\[SB5012\] Spark is gone from this driver"):
        parse_schema("n BIGINT", "splits")


def test_a_context_that_was_stopped_is_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, AttributeError("'NoneType' has no attribute 'sc'"), is_stopped=True)
    with pytest.raises(SparkLostError):
        parse_schema("n BIGINT", "splits")


def test_what_spark_cannot_read_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, ParseException("[PARSE_SYNTAX_ERROR] near 'BIGIN'"))
    with pytest.raises(SchemaError, match=r"splits, 'n BIGIN', does not parse \(.*near 'BIGIN'"):
        parse_schema("n BIGIN", "splits")


def test_any_other_error_is_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, ZeroDivisionError("of this library's own"))
    with pytest.raises(ZeroDivisionError):
        parse_schema("n BIGINT", "splits")
