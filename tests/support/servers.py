"""Real S3 servers on loopback, in processes of their own.

They live in a virtual environment of their own (ministack pins botocore), which the environment
variable STATEBACKEND_SERVERS names by its `bin`; tox makes it.
"""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["Certificates", "Server", "make_certificates", "server_binaries", "start_server"]

VARIABLE = "STATEBACKEND_SERVERS"
START_LIMIT_S = 60.0


@dataclass(frozen=True)
class Certificates:
    """A certificate for loopback, and the file that makes a client trust it."""

    server: ssl.SSLContext
    ca_bundle: Path


@dataclass(frozen=True)
class Server:
    """A running server."""

    kind: str
    url: str
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """End the server's whole process group, which nobody else is in."""
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)


def server_binaries() -> Path:
    """Where the servers are; skips the test, or fails it in CI, if nobody said."""
    said = os.environ.get(VARIABLE, "")
    if not said:
        reason = f"{VARIABLE} does not name the folder of ministack and moto_server; tox sets it."
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return Path(said)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_server(kind: str, folder: Path) -> Server:
    """Start `ministack` or `moto` and wait until it answers; its output goes to `folder`."""
    port = free_port()
    binaries = server_binaries()
    env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    if kind == "ministack":
        command = [str(binaries / "ministack")]
        env |= {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "SFTP_ENABLED": "0"}
        env |= {"SERVICES": "s3"}
    else:
        command = [str(binaries / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{kind}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(kind, f"http://127.0.0.1:{port}", process)
    _wait(server, log)
    return server


def _wait(server: Server, log: Path) -> None:
    until = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until and server.process.poll() is None:
        try:
            with urllib.request.urlopen(server.url, timeout=5):
                return
        except urllib.error.HTTPError as error:
            error.close()
            return  # it answers
        except OSError:
            time.sleep(0.05)
    if server.process.poll() is None:
        server.stop()
    raise RuntimeError(f"{server.kind} did not start:\n{log.read_text(errors='replace')[-2000:]}")


def make_certificates(folder: Path) -> Certificates:
    """A new authority, and a certificate of it for 127.0.0.1 and localhost."""
    import trustme  # not by every test run that this module's fixtures are offered to

    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    ca_bundle = folder / "ca.pem"
    authority.cert_pem.write_to_path(str(ca_bundle))
    return Certificates(context, ca_bundle)
