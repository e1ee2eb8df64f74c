"""Makes one error of all the ways in which a call into Spark's JVM finds that it is gone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from py4j.protocol import Py4JNetworkError
from pyspark import SparkContext

from statebackend.errors import SparkLostError

__all__ = ["calls"]


@contextlib.contextmanager
def calls() -> Iterator[None]:
    """Goes around calls into the JVM, and around nothing else.

    Raises:
        SparkLostError: it is gone, or its SparkContext is stopped.
    """
    try:
        yield
    except Exception as error:
        if not (isinstance(error, Py4JNetworkError | ConnectionError) or _stopped()):
            raise
        raise SparkLostError(
            f"Spark is gone from this driver: its JVM has ended, or its SparkContext was stopped "
            f"({type(error).__name__}).",
            todo="Start the driver again: the job goes on from its last complete checkpoint. See "
            "Spark's log for why it ended.",
        ) from error


def _stopped() -> bool:
    """Whether there is no SparkContext any more, or no JVM that answers for it.

    An error alone does not say so: that of a call during which the JVM ended looks like that of a
    call for something which is not there.
    """
    context = SparkContext._active_spark_context
    if context is None or context._jsc is None:
        return True
    try:
        return bool(context._jsc.sc().isStopped())
    except Exception:
        return True
