"""Shortens an error of Spark's JVM that goes back to it through a ``foreachBatch`` function.

Spark searches the text of what such a function raised for an interruption, to tell a stop from a
failure (`StreamExecution.isInterruptionException`). Its regular expression takes a stack frame for
each character: over some 1,500 of them the stream's thread ends with a StackOverflowError.
"""

from __future__ import annotations

from typing import Final

from py4j.protocol import Py4JJavaError

__all__ = ["ShortJavaError"]

_SHOWN: Final = 800  # characters


class ShortJavaError(Py4JJavaError):  # type: ignore[misc]
    """An error of the JVM without its stack, which Spark's log has."""

    def __init__(self, error: Py4JJavaError) -> None:
        super().__init__(error.errmsg, error.java_exception)
        lines = _text_of(error).splitlines()
        said = "\n".join(line for line in lines if not line.startswith("\t"))
        # Begins with the type as Python prints it: Spark looks for that.
        self._text = f"py4j.protocol.Py4JJavaError: {said}"[:_SHOWN]

    def __str__(self) -> str:
        return self._text


def _text_of(error: Py4JJavaError) -> str:
    """What the JVM says of it, or Python alone where the JVM is gone."""
    try:
        return str(error)
    except Exception:  # it is asked only now
        return str(error.errmsg)
