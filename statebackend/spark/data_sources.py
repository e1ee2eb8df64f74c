"""Python data sources of ours, made known to a session once."""

from __future__ import annotations

import weakref
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

from statebackend.operators.errors import lost_jvm as jvm

__all__ = ["registered"]

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
