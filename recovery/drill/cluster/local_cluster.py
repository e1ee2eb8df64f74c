"""Clusters of real processes on this machine's loopback addresses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from recovery.drill.cluster.live_processes import DISK, TOKEN, LiveProcesses
from recovery.drill.cluster.polling import until
from statebackend.errors import DrillError

__all__ = [
    "LOCAL_DIR",
    "SHORT_LIVED",
    "TWO_HOSTS",
    "Cluster",
    "DiskHost",
    "SparkMaster",
    "TwoHosts",
    "open_cluster",
]

TWO_HOSTS: Final = "two-hosts"
LOCAL_DIR: Final = f"${DISK}/state"  # the backend's `local_dir=`: each host fills in its own disk
START_LIMIT_S: Final = 300.0
SHORT_LIVED: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For JVMs of seconds or minutes: optimising their code would be half of all their time."""


@dataclass(frozen=True)
class DiskHost:
    """A host with a disk of its own: a folder that goes with it when it is lost."""

    name: str
    disk: Path

    @property
    def local_dir(self) -> Path:
        """Where the task-local copies of its executors lie."""
        return self.disk / "state"


class Cluster:
    """What executors run on. Use it as a context manager.

    Attributes:
        name: as it was asked for.
        master: for the session's builder.
        hosts: that have executors.
        processes: the living ones, of drivers too.
        environment: for every process that is started; this process's own unless one is given.
    """

    name: str
    master: str

    def __init__(
        self,
        folder: Path,
        token: str,
        hosts: Sequence[DiskHost],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.hosts = list(hosts)
        self.processes = LiveProcesses(token, {host.name: host.disk for host in hosts})
        base = os.environ if environment is None else environment
        self.environment = {
            **{name: value for name, value in base.items() if name != DISK},
            TOKEN: token,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
        }

    def driver_environment(self) -> dict[str, str]:
        """The variables of a driver's process."""
        return dict(self.environment)

    def start(self) -> None:
        """Start what stays while drivers come and go. Raises `DrillError`."""
        for host in self.hosts:
            host.disk.mkdir(parents=True, exist_ok=True)

    def stop(self) -> None:
        """End every process of the drill, drivers and frozen ones too."""
        self.processes.end()

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class SparkMaster(Cluster):
    """Any master that a driver brings along: `local-cluster[2,1,1024]`, `local[2]`: one host."""

    def __init__(
        self, master: str, folder: Path, token: str, environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(folder, token, [DiskHost("127.0.0.1", folder / "disk")], environment)
        self.name = self.master = master

    def driver_environment(self) -> dict[str, str]:
        """The variables of a driver's process, which its executors inherit."""
        return self.environment | {DISK: str(self.hosts[0].disk)}


class TwoHosts(Cluster):
    """A standalone master, and two workers on addresses of their own, each with its own disk."""

    name = TWO_HOSTS

    def __init__(
        self, folder: Path, token: str, environment: Mapping[str, str] | None = None
    ) -> None:
        names = ("127.0.0.2", "127.0.0.3")
        hosts = [DiskHost(name, folder / f"host-{name}") for name in names]
        super().__init__(folder, token, hosts, environment)
        self._port = _free_port()
        self.master = f"spark://127.0.0.1:{self._port}"
        self._servers: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the servers, and wait until the workers are known. Raises `DrillError`."""
        super().start()
        log = self.folder / "master.log"
        self._serve(
            log,
            {"SPARK_MASTER_OPTS": "-Dspark.deploy.maxExecutorRetries=-1"},
            "org.apache.spark.deploy.master.Master",
            *("--host", "127.0.0.1", "--port", str(self._port), "--webui-port", "0"),
        )
        for host in self.hosts:
            self._serve(
                self.folder / f"worker-{host.name}.log",
                {"SPARK_LOCAL_IP": host.name, DISK: str(host.disk)},
                "org.apache.spark.deploy.worker.Worker",
                *("--host", host.name, "--webui-port", "0", "-c", "1", "-m", "1g"),
                *("-d", str(host.disk / "work"), self.master),
            )

        def registered() -> bool:
            return log.read_text(errors="replace").count("Registering worker") == len(self.hosts)

        until(registered, "the workers to register", START_LIMIT_S, tend=self._still_there)

    def stop(self) -> None:
        """End every process of the drill."""
        super().stop()
        for server in self._servers:
            server.wait(timeout=30)

    def _still_there(self) -> None:
        for server in self._servers:
            if server.poll() is not None:
                raise DrillError(
                    f"A server of the cluster ended with {server.returncode}.",
                    todo=f"Look at the logs in {self.folder}.",
                )

    def _serve(self, log: Path, environment: Mapping[str, str], *words: str) -> None:
        import pyspark

        home = Path(pyspark.__file__).parent
        with log.open("wb") as output:
            server = subprocess.Popen(
                [str(home / "bin" / "spark-class"), *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={
                    "SPARK_DAEMON_JAVA_OPTS": SHORT_LIVED,
                    **self.environment,
                    "SPARK_HOME": str(home),
                    **environment,
                },
                start_new_session=True,
            )
        self._servers.append(server)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def open_cluster(
    name: str, folder: Path, token: str, environment: Mapping[str, str] | None = None
) -> Cluster:
    """A cluster by its name, not started.

    Args:
        name: `two-hosts`, or a Spark master that needs no servers of its own.
        folder: for its disks and logs.
        token: marks its processes.
        environment: the variables of all processes. None: those of this process.

    Raises:
        DrillError: there is no such cluster.
    """
    if name == TWO_HOSTS:
        return TwoHosts(folder, token, environment)
    if name.startswith(("local[", "local-cluster[")) or name == "local":
        return SparkMaster(name, folder, token, environment)
    raise DrillError(
        f"The cluster {name!r} is not one that a drill can start and strike.",
        todo="Use two-hosts, local-cluster[executors,cores,memory_mb] or local[threads].",
    )
