"""What goes back to Spark of an error of its JVM, also once that JVM is gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from py4j.protocol import Py4JJavaError, Py4JNetworkError

from statebackend.spark.java_errors import ShortJavaError

EXCEPTION: Any = SimpleNamespace(_target_id="o1", _gateway_client=None)


class Thrown(Py4JJavaError):  # type: ignore[misc]
    """Says what a test wants, where py4j asks the JVM."""

    def __init__(self, say: Any) -> None:
        super().__init__("An error occurred while calling o1.collect.\n", EXCEPTION)
        self._say = say

    def __str__(self) -> str:
        return str(self._say())


def lost() -> NoReturn:
    raise Py4JNetworkError("Connection refused")


def test_an_error_whose_jvm_is_gone_says_what_python_knows() -> None:
    short = ShortJavaError(Thrown(lost))
    assert str(short) == (
        "py4j.protocol.Py4JJavaError: An error occurred while calling o1.collect."
    )


@pytest.mark.parametrize("said", ["", "\tat org.apache.spark.Somewhere"])
def test_an_error_without_a_sentence_is_still_one(said: str) -> None:
    assert str(ShortJavaError(Thrown(lambda: said))).startswith("py4j.protocol.Py4JJavaError: ")
