"""Existing PySpark code with state kept here: one line before it, nothing changed in it.

`install` puts other functions in the place of three methods of ``GroupedData`` (the stateful ones)
and three of ``DataStreamWriter`` (those that start a query). They do ours for a session that
`install` was called for, and for queries over its frames; Spark's own methods run for everything
else. ``awaitAnyTermination`` is Spark's, and tells an error of ours as one, and
``spark.read.format`` makes the format ``statebackend`` known where it is asked for. Nothing else of
Spark is touched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final

from pyspark.sql import DataFrame, GroupedData, SparkSession
from pyspark.sql.streaming.query import StreamingQueryManager
from pyspark.sql.streaming.readwriter import DataStreamWriter

from recovery.savepoints.savepoint import Savepoint
from statebackend.backend import StateBackend
from statebackend.errors import SettingError
from statebackend.settings import ENABLED
from statebackend.spark.query_failures import told_shortly
from statebackend.spark.start.stateful_writer import StatefulStreamWriter
from statebackend.spark.start.writer_inspection import functions_in
from statebackend.threads import THREADS

__all__ = ["Installed", "install", "installed", "uninstall"]

_lock: Final = THREADS.lock()
_backends: Final[list[tuple[SparkSession, StateBackend]]] = []
# None: the class has it from another one.
_spark_methods: Final[dict[tuple[type, str], Callable[..., Any] | None]] = {}


class Installed:
    """What `install` returns. As a context manager it is uninstalled at the end.

    What was installed in the session before it is in force again then.

    Attributes:
        backend: of the session's frames.
    """

    def __init__(self, backend: StateBackend) -> None:
        self.backend = backend

    def __enter__(self) -> StateBackend:
        return self.backend

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _take_out(lambda spark, backend: backend is self.backend)


def install(
    spark: SparkSession,
    *,
    uri: str | None = None,
    local_dir: str | None = None,
    parallelism: int | None = None,
    max_parallelism: int | None = None,
    commit: str | None = None,
    savepoint: str | Savepoint | None = None,
    allow_dropped_state: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Installed:
    """Have a session's stateful operators keep their state here.

    From then on ``groupBy(...).transformWithState(...)``, ``transformWithStateInPandas`` and
    ``applyInPandasWithState`` on streaming frames of this session, and the ``start``, ``toTable``
    and ``foreachBatch`` of queries over them. An operator's uid is the name of its processor's
    class; a query's job follows from its checkpoint location. Other sessions and other queries are
    left alone. With ``spark.statebackend.enabled=false`` nothing is installed.

    Example::

        statebackend.install(spark, uri="s3://bucket/state", local_dir="/data/state")
        counts = clicks.groupBy("user").transformWithState(Counter(), schema, "Append", "None")
        query = counts.writeStream.option("checkpointLocation", folder).start(path)

    Args:
        spark: a classic session. The others: as `statebackend.StateBackend` takes them; all but
            ``savepoint`` can be a ``spark.statebackend.*`` key. With a ``savepoint`` it is for one
            query: install again before the frame of another.

    Returns:
        a handle; as a context manager it gives the backend, and uninstalls it at its end.

    Raises:
        SparkConnectError, SettingError, EnvironmentMissingError, SparkLostError: as `StateBackend`.
    """
    backend = StateBackend(
        spark,
        uri=uri,
        local_dir=local_dir,
        parallelism=parallelism,
        max_parallelism=max_parallelism,
        commit=commit,
        savepoint=savepoint,
        allow_dropped_state=allow_dropped_state,
        settings=settings,
    )
    with _lock:
        if _enabled(spark):
            _backends.append((spark, backend))
            _put_in_place()
    return Installed(backend)


def _enabled(spark: SparkSession) -> bool:
    given = str(spark.conf.get(ENABLED, "true"))
    if given.lower() not in ("true", "1", "false", "0"):
        raise SettingError(f"The setting {ENABLED} is {given!r}.", todo="Give true or false.")
    return given.lower() in ("true", "1")


def uninstall(spark: SparkSession) -> None:
    """Have Spark's own methods again in a session. Queries that run go on.

    A frame that was made before, and is not started yet, can be started with the backend's
    ``write_stream`` only.
    """
    _take_out(lambda session, backend: _same(session, spark))


def _take_out(ended: Callable[[SparkSession, StateBackend], bool]) -> None:
    with _lock:
        _backends[:] = [one for one in _backends if not ended(*one)]
        if not _backends:
            while _spark_methods:
                (owner, name), method = _spark_methods.popitem()
                if method is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, method)


def installed(spark: SparkSession) -> StateBackend | None:
    """The backend that was installed in a session last; None: there is none."""
    found = [backend for session, backend in _backends if _same(session, spark)]
    return found[-1] if found else None


def _same(one: SparkSession, other: SparkSession) -> bool:
    """Whether two objects of Python's are one session of Spark's."""
    return one is other or bool(one._jsparkSession == other._jsparkSession)


def _put_in_place() -> None:
    if _spark_methods:
        return
    for owner, name, made in (
        (GroupedData, "transformWithState", _operator("transform_with_state")),
        (
            GroupedData,
            "transformWithStateInPandas",
            _operator("transform_with_state_in_pandas"),
        ),
        (GroupedData, "applyInPandasWithState", _operator("apply_in_pandas_with_state")),
        (DataStreamWriter, "start", _of_query("start")),
        (DataStreamWriter, "toTable", _of_query("to_table")),
        (DataStreamWriter, "foreachBatch", _of_query("foreach_batch")),
        (StreamingQueryManager, "awaitAnyTermination", told_shortly),
    ):
        method = getattr(owner, name)
        _spark_methods[owner, name] = vars(owner).get(name)
        setattr(owner, name, functools.wraps(method)(made(method)))


Method = Callable[..., Any]


def _operator(ours: str) -> Callable[[Method], Method]:
    """A method of ``GroupedData``: the backend's of that name, for a stream of its session."""

    def make(method: Method) -> Method:
        def call(grouped: GroupedData, *given: Any, **named: Any) -> DataFrame:
            backend = installed(grouped.session)
            if backend is None or not grouped._df.isStreaming:
                made: DataFrame = method(grouped, *given, **named)
            else:
                made = getattr(backend, ours)(grouped, *given, **named)
            return made

        return call

    return make


def _of_query(ours: str) -> Callable[[Method], Method]:
    """A method of ``DataStreamWriter``: ours, for a query with frames of an installed backend."""

    def make(method: Method) -> Method:
        def call(writer: DataStreamWriter, *given: Any, **named: Any) -> Any:
            backend = _backend_of(writer)
            if backend is None:
                return method(writer, *given, **named)
            return getattr(backend.writer_calls, ours)(writer, *given, **named)

        return call

    return make


def _backend_of(writer: DataStreamWriter) -> StateBackend | None:
    """The installed backend that has frames in a query; None: it is Spark's alone."""
    if not isinstance(writer, StatefulStreamWriter):
        names = functions_in(writer)
        for _, backend in _backends:
            if names and backend.has_made(names):
                return backend
    return None
