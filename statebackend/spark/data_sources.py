"""Python data sources of ours, made known to a session once."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Final

from pyspark.sql import DataFrameReader, SparkSession
from pyspark.sql.datasource import DataSource

from statebackend.operators.errors import lost_jvm as jvm

__all__ = ["register_when_read", "registered", "session_of"]

_known: Final[dict[type[DataSource], weakref.WeakSet[SparkSession]]] = {}


def registered(session: SparkSession, source: type[DataSource]) -> None:
    """Have a session know a source by its name. Spark warns of one that is registered again.

    The session is the active one meanwhile: Spark looks the name up in the active one, and refuses
    to register what that knows already.

    Raises:
        SparkLostError: Spark's JVM is gone.
    """
    sessions = _known.setdefault(source, weakref.WeakSet())
    if session in sessions:
        return
    with jvm.calls():
        java = session._jvm.org.apache.spark.sql.classic.SparkSession  # type: ignore[union-attr]
        active = java.getActiveSession()
        java.setActiveSession(session._jsparkSession)
        try:
            session.dataSource.register(source)
        finally:
            if active.isDefined():
                java.setActiveSession(active.get())
            else:
                java.clearActiveSession()
    sessions.add(session)


def register_when_read(name: str, register: Callable[[SparkSession], None]) -> None:
    """Have ``spark.read.format(name)`` register a source first, in any session of this process.

    Spark's first registration in a JVM starts a Python that looks for sources: a second that only
    those who read should pay. Called again it does nothing.
    """
    really = DataFrameReader.format
    if name in getattr(really, "registers", ()):
        return

    @functools.wraps(really)
    def format(self: DataFrameReader, source: str) -> DataFrameReader:
        if isinstance(source, str) and source.lower() == name:
            register(session_of(self))
        return really(self, source)

    format.registers = (name, *getattr(really, "registers", ()))  # type: ignore[attr-defined]
    DataFrameReader.format = format  # type: ignore[method-assign]


def session_of(reader: DataFrameReader) -> SparkSession:
    """The session that a reader is of."""
    session: Any = reader._spark
    if not isinstance(session, SparkSession):
        raise LookupError(f"a reader's session is {type(session).__name__}")
    return session
