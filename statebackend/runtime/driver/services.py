"""What a driver process has one of: the service that its executors reach it by."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import ClassVar

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from statebackend.errors import SettingError
from statebackend.rpc.driver_server import Server
from statebackend.rpc.tls import driver_tls
from statebackend.runtime.driver.session import RunSession
from statebackend.settings import Settings

__all__ = ["RunningQuery", "Services", "driver_server"]


@dataclass
class RunningQuery:
    """The query that ran a job last in this driver.

    Attributes:
        name: of its session, which the server answers for; it does so until the job is started
            again, since workers may still upload for a query that has ended.
        query: None once it was seen to have ended: it holds its plans in Spark's JVM.
    """

    server: Server
    name: str
    session: RunSession
    query: StreamingQuery | None

    def active(self) -> StreamingQuery | None:
        """The query, if it runs. One that has ended is let go."""
        query = self.query
        if query is None or query.isActive:
            return query
        self.query = None
        self.session.query_ended()
        return None


class Services:
    """The driver's server (one without TLS, one with it), and which jobs it is running."""

    lock: ClassVar[threading.Lock] = threading.Lock()
    starting: ClassVar[threading.RLock] = threading.RLock()
    servers: ClassVar[dict[bool, Server]] = {}  # by whether they speak TLS
    running: ClassVar[dict[str, RunningQuery]] = {}
    # By name, as the local property of a query's batches has it; a session goes with its start.
    sessions: ClassVar[weakref.WeakValueDictionary[str, RunSession]] = weakref.WeakValueDictionary()

    @classmethod
    def get(cls, spark: SparkSession, settings: Settings) -> Server:
        """See `driver_server`."""
        tls = driver_tls(settings)
        with cls.lock:
            known = cls.servers.get(tls is not None)
            if known is not None:
                return known
            port = settings.driver_port
            if port and any(server.port == port for server in cls.servers.values()):
                raise SettingError(
                    f"Port {port} of this driver is in use by backends "
                    f"{'without' if tls else 'with'} TLS.",
                    todo="Give all backends of a driver the same spark.statebackend.tls, or others "
                    "another spark.statebackend.driver.port.",
                )
            conf = spark.sparkContext.getConf()
            host = settings.driver_host or conf.get("spark.driver.host") or "127.0.0.1"
            bind = settings.driver_bind or conf.get("spark.driver.bindAddress") or host
            made = Server(bind=bind, advertised=host, port=port, tls=tls)
            return cls.servers.setdefault(tls is not None, made)


def driver_server(spark: SparkSession, settings: Settings) -> Server:
    """The one of this driver process that does, or does not, speak TLS; made when first asked for.

    Raises:
        SettingError: the one without TLS has the port that the other one should have.
        EnvironmentMissingError: the package that TLS needs is not installed.
    """
    return Services.get(spark, settings)
