"""A ``foreachBatch`` function that may not return before the epoch of its batch is complete."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from typing import Any

from py4j.clientserver import ClientServer
from py4j.protocol import Py4JJavaError
from pyspark import SparkContext
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from statebackend.runtime.driver.services import Services
from statebackend.runtime.driver.session import RunSession
from statebackend.spark.java_errors import ShortJavaError
from statebackend.spark.worker.batch_context import ENDPOINT_PROPERTY

__all__ = ["CheckedBatches", "function_of", "session_of"]

_log = logging.getLogger("statebackend.spark")


class CheckedBatches:
    """Runs the user's function, then asks the query's session whether the batch was used whole.

    One function may be of several queries: which one's batch it is, the batch's thread says.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, frame: DataFrame, batch_id: int, *rest: Any) -> Any:
        """What the user's function returns.

        Raises:
            StateBackendError: the function read a part of the frame only.
        """
        session = session_of(frame)  # the function may stop its query
        try:
            result = self._function(frame, batch_id, *rest)
        except Py4JJavaError as error:
            raise ShortJavaError(error).with_traceback(error.__traceback__) from None
        if session is not None:
            session.check_finished(batch_id)
        return result


def session_of(frame: DataFrame) -> RunSession | None:
    """Of the query whose batch this is: its thread has the local properties of its start."""
    context = frame.sparkSession.sparkContext
    if not isinstance(context._gateway, ClientServer):  # PYSPARK_PIN_THREAD=false: no properties
        live = [run.session for run in list(Services.running.values()) if run.active() is not None]
        return live[0] if len(live) == 1 else None
    said = context.getLocalProperty(ENDPOINT_PROPERTY)
    return Services.sessions.get(json.loads(said)[1]) if said else None


def function_of(query: StreamingQuery) -> Any:
    """The Python function of a query's ``foreachBatch``; None: it has none, or it is not found.

    Spark has no way to ask for it. Its sink holds a closure of Scala's, and that a proxy, by whose
    number Py4J finds the Python object.
    """
    try:
        sink: Any = query._jsq.streamingQuery().sink()
        field = sink.getClass().getDeclaredField("batchWriter")
        field.setAccessible(True)
        closure = field.get(sink)
        (held,) = closure.getClass().getDeclaredFields()
        held.setAccessible(True)
        java: Any = SparkContext._jvm
        handler = java.java.lang.reflect.Proxy.getInvocationHandler(held.get(closure))
        number = handler.getClass().getDeclaredField("id")
        number.setAccessible(True)
        return sink._gateway_client.gateway_property.pool[number.get(handler)].func
    except Exception as error:  # another sink, or whatever another release of Spark answers
        _log.debug("the function of query %s was not found: %r", query.id, error)
        return None
