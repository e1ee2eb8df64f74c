"""A Kafka broker on loopback, or three, from the jars that Apache publishes. Its data go with it.

Maven fetches the jars once, into the folder that the environment variable STATEBACKEND_JARS names,
or into ``.tox/jars``. The brokers run in KRaft mode: each is a controller as well.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.maven import jars_of
from tests.support.servers import free_port

__all__ = ["Broker", "KafkaCluster", "connector_jars", "start_kafka"]

BROKER_JARS: Final = "org.apache.kafka:kafka_2.13:4.4.0"
CONNECTOR_JARS: Final = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"
CLUSTER_ID: Final = "c3RhdGViYWNrZW5kLTAwMQ"
START_LIMIT_S: Final = 90.0
SMALL_JVM: Final = ("-Xmx256m", "-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


def _wanted() -> None:
    """Skips the test without `tox -e kafka`; fails it there if something is missing."""
    if not os.environ.get("STATEBACKEND_KAFKA"):
        pytest.skip("needs a Kafka broker: run by tox -e kafka, which sets STATEBACKEND_KAFKA")
    missing = [name for name in ("mvn", "java") if shutil.which(name) is None]
    if missing:
        pytest.fail(f"{' and '.join(missing)} not found: install Maven and JDK 17.")


def connector_jars() -> list[Path]:
    """Spark's own Kafka connector, for ``spark.jars``.

    Without Scala and Hadoop, which PySpark brings along.
    """
    brought = ("hadoop-", "scala-", "slf4j-", "snappy-", "lz4-", "jsr305-", "spark-tags")
    return [jar for jar in jars_of(CONNECTOR_JARS) if not jar.name.startswith(brought)]


class Broker:
    """One process of a cluster. Use `KafkaCluster`."""

    def __init__(self, number: int, folder: Path, jars: list[Path], java: Sequence[str]) -> None:
        self.number, self.port, self.controller_port = number, free_port(), free_port()
        self.login_port = free_port()
        self._folder, self._jars, self._java = folder, jars, java
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def login(self) -> str:
        """The address of the listener LOGIN: there if a cluster's options say how to log in."""
        return f"127.0.0.1:{self.login_port}"

    def configure(self, voters: str, options: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """Write its settings; the process that makes its storage."""
        self._folder.mkdir(parents=True, exist_ok=True)
        lines = {
            "process.roles": "broker,controller",
            "node.id": self.number,
            "controller.quorum.voters": voters,
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://127.0.0.1:{self.controller_port}",
            "advertised.listeners": f"PLAINTEXT://{self.address}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": self._folder / "data",
        }
        if "listener.name.login.sasl.enabled.mechanisms" in options:
            for name in ("listeners", "advertised.listeners"):
                lines[name] = f"{lines[name]},LOGIN://{self.login}"
            lines["listener.security.protocol.map"] += ",LOGIN:SASL_SSL"
        lines |= options
        text = "".join(f"{name}={value}\n" for name, value in lines.items())
        (self._folder / "server.properties").write_text(text)
        return self._run("kafka.tools.StorageTool", "format", "-t", CLUSTER_ID)

    def _run(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        properties = str(self._folder / "server.properties")
        given = [*words, "-c", properties] if words else [properties]
        classes = ":".join(map(str, self._jars))
        with (self._folder / "out.log").open("ab") as output:
            return subprocess.Popen(
                ["java", *self._java, "-cp", classes, name, *given],
                cwd=self._folder,
                env={name: value for name, value in os.environ.items() if "KAFKA" not in name},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start(self) -> None:
        """Begin; it takes connections some seconds later."""
        self.process = self._run("kafka.Kafka")

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)

    def said(self) -> str:
        """The end of its log."""
        return (self._folder / "out.log").read_text(errors="replace")[-3000:]


class KafkaCluster:
    """Brokers that know each other.

    Args:
        options: of every broker, by Kafka's names.
        java: options of each broker's JVM.
    """

    def __init__(
        self,
        folder: Path,
        brokers: int,
        options: Mapping[str, Any],
        java: Sequence[str] = SMALL_JVM,
    ) -> None:
        jars = jars_of(BROKER_JARS)
        self.brokers = [Broker(n, folder / f"{n}", jars, java) for n in range(brokers)]
        copies, safe = min(3, brokers), min(2, brokers)
        internal = ("offsets.topic", "transaction.state.log")
        given = {
            **{f"{topic}.replication.factor": copies for topic in internal},
            **{f"{topic}.num.partitions": 3 for topic in internal},
            "transaction.state.log.min.isr": safe,
            "min.insync.replicas": safe,
            "default.replication.factor": copies,
            "group.initial.rebalance.delay.ms": 0,
            "auto.create.topics.enable": "false",
            "num.network.threads": 2,
            "num.io.threads": 4,
            "log.retention.check.interval.ms": 1000,
            "log.segment.delete.delay.ms": 500,
            **options,
        }
        voters = ",".join(f"{b.number}@127.0.0.1:{b.controller_port}" for b in self.brokers)
        formats = [broker.configure(voters, given) for broker in self.brokers]
        for one in formats:
            if one.wait(START_LIMIT_S):
                raise RuntimeError(f"Kafka's storage was not made: {self.brokers[0].said()}")

    @property
    def bootstrap(self) -> str:
        """For ``bootstrap.servers``."""
        return ",".join(broker.address for broker in self.brokers)

    def start(self) -> None:
        """Begin all, and wait until they take produce requests of clients."""
        for broker in self.brokers:
            broker.start()
        self.wait()

    def wait(self) -> None:
        """Until every broker that runs is known to the others."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        running = [b for b in self.brokers if b.process is not None and b.process.poll() is None]
        until = time.monotonic() + START_LIMIT_S
        while time.monotonic() < until:
            dead = [b for b in running if b.process is None or b.process.poll() is not None]
            if dead:
                raise RuntimeError(f"A broker did not start: {dead[0].said()}")
            settings = {"bootstrap.servers": self.bootstrap, "log_level": 0}
            try:
                found = AdminClient(settings).list_topics(timeout=2).brokers
            except KafkaException:
                continue
            if len(found) >= len(running):
                return
            time.sleep(0.1)
        raise RuntimeError(f"Kafka did not start: {running[0].said()}")

    def restart(self, number: int, away_s: float = 0.0) -> None:
        """SIGKILL a broker, and start it again in its place."""
        self.brokers[number].kill()
        time.sleep(away_s)
        self.brokers[number].start()

    def freeze(self, number: int) -> None:
        """SIGSTOP a broker."""
        process = self.brokers[number].process
        assert process is not None
        process.send_signal(signal.SIGSTOP)

    def thaw(self, number: int) -> None:
        """SIGCONT a broker."""
        process = self.brokers[number].process
        assert process is not None
        process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End all of them."""
        for broker in self.brokers:
            broker.kill()


def start_kafka(
    folder: Path, brokers: int = 1, options: Mapping[str, Any] | None = None
) -> KafkaCluster:
    """Brokers without data; outside `tox -e kafka` the test is skipped.

    Args:
        options: of every broker, by Kafka's names.
    """
    _wanted()
    cluster = KafkaCluster(folder, brokers, options or {})
    try:
        cluster.start()
    except BaseException:
        cluster.stop()
        raise
    return cluster
