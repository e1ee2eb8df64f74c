"""Real clusters of processes on loopback."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spark.cluster.trial import Trial, kill, processes, until


@pytest.fixture
def local_cluster(tmp_path: Path) -> Iterator[Trial]:
    """Two executor processes under one driver."""
    trial = Trial(tmp_path, f"sb-{os.getpid()}-{tmp_path.name}", "local-cluster[2,1,1024]")
    yield trial
    trial.end()


def _spark_class(*words: str, **env: str) -> subprocess.Popen[bytes]:
    import pyspark

    home = Path(pyspark.__file__).parent
    with Path(env["SB_LOG"]).open("wb") as log:
        return subprocess.Popen(
            [str(home / "bin" / "spark-class"), *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "SPARK_HOME": str(home), **env},
            start_new_session=True,
        )


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[Trial]:
    """A standalone master and two workers that count as two hosts, each with its own disk."""
    token = f"sb-{os.getpid()}-{tmp_path.name}"
    port = random.Random(str(tmp_path)).randrange(20000, 28000)
    trial = Trial(tmp_path, token, f"spark://127.0.0.1:{port}")
    log = tmp_path / "master.log"
    servers = [
        _spark_class(
            "org.apache.spark.deploy.master.Master",
            *("--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"),
            SB_TEST=token,
            SB_LOG=str(log),
            SPARK_LOCAL_IP="127.0.0.1",
        )
    ]
    for host in ("127.0.0.2", "127.0.0.3"):
        disk = tmp_path / f"host-{host}"
        disk.mkdir()
        servers.append(
            _spark_class(
                "org.apache.spark.deploy.worker.Worker",
                *("--host", host, "--webui-port", "0", "-c", "1", "-m", "1g"),
                *("-d", str(disk / "work"), trial.master),
                SB_TEST=token,
                SB_LOG=str(tmp_path / f"worker-{host}.log"),
                SPARK_LOCAL_IP=host,
                SB_HOST_DISK=str(disk),
            )
        )
    until(lambda: log.read_text(errors="replace").count("Registering worker") == 2, "two workers")
    yield trial
    trial.end()
    for server in servers:
        server.kill()
        server.wait(timeout=30)
    kill(processes(token))
