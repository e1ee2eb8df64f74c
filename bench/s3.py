"""A real S3 server on loopback for the benchmarks, with a counting proxy where one is wanted.

The environment variable STATEBACKEND_SERVERS names the `bin` folder that ministack is in; tox sets
it. The server is a process of its own, but shares the machine's cores with what is measured.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshot.storage.store_options import StoreOptions

__all__ = ["REGION", "Place", "place"]

REGION = "us-east-1"
_BUCKET = "bench"
_START_S = 60.0


@dataclass(frozen=True)
class Place:
    """A bucket on a running server. ``address``: host:port, for a proxy."""

    address: str
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def uri(self, name: str) -> str:
        return f"s3://{_BUCKET}/{name}"

    def options(self, **given: Any) -> StoreOptions:
        return StoreOptions(endpoint_url=self.url, region=REGION, **given)

    def freeze(self, frozen: bool) -> None:
        """Have the server of `place` answer nobody, or go on."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    def stored_bytes(self, name: str) -> dict[str, int]:
        """What lies under a name now, by folder (`log`, `data`, `base`)."""
        import boto3

        client = boto3.session.Session().client("s3", endpoint_url=self.url, region_name=REGION)
        found: dict[str, int] = {}
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=_BUCKET, Prefix=name):
            for one in page.get("Contents", ()):
                folder = one["Key"].split("/")[-2]
                found[folder] = found.get(folder, 0) + int(one["Size"])
        return found


@contextlib.contextmanager
def place(folder: Path) -> Iterator[Place]:
    """Start the server and make its bucket; it ends with the context."""
    import boto3

    os.environ.setdefault("AWS_ACCESS_KEY_ID", "bench")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "bench")
    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = _start(folder, port)
    found = Place(f"127.0.0.1:{port}", server)
    try:
        _wait(found.url, server)
        client = boto3.session.Session().client("s3", endpoint_url=found.url, region_name=REGION)
        client.create_bucket(Bucket=_BUCKET)
        yield found
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(10)


def _start(folder: Path, port: int) -> subprocess.Popen[bytes]:
    bin_folder = os.environ.get("STATEBACKEND_SERVERS", "")
    program = shutil.which("ministack", path=bin_folder or None)
    if program is None:
        raise RuntimeError(
            "ministack was not found: STATEBACKEND_SERVERS must name the folder that it is in "
            "(tox sets it)."
        )
    env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    env |= {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port)}
    env |= {"SFTP_ENABLED": "0", "SERVICES": "s3"}
    with (folder / "ministack.log").open("wb") as output:
        return subprocess.Popen(
            [program],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(url: str, server: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError as error:
            error.close()
            return  # it answers
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("ministack did not start")
