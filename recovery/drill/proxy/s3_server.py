"""A real S3 server on loopback for drills that need one; in a process of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from statebackend.errors import DrillError
from statebackend.texts import install_extra

__all__ = ["BUCKET", "S3Server", "credentials"]

VARIABLE: Final = "STATEBACKEND_SERVERS"
BUCKET: Final = "drill"
_START_LIMIT_S: Final = 60.0
_KINDS: Final = ("ministack", "moto_server")  # the first that is there


def credentials(folder: Path) -> dict[str, str]:
    """Variables for clients of such a server: keys that mean nothing, and nobody's own files."""
    return {
        "AWS_ACCESS_KEY_ID": "drill",
        "AWS_SECRET_ACCESS_KEY": "not-so-secret",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(folder / "no-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "no-credentials"),
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }


class S3Server:
    """ministack, or moto's server, with one bucket. Use it as a context manager.

    Args:
        folder: for its log.
        environment: of the process, such as the token of the drill.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    def __enter__(self) -> S3Server:
        program = _program()
        port = _free_port()
        self.address = f"127.0.0.1:{port}"
        env = {n: v for n, v in self._environment.items() if not n.startswith(("AWS_", "PYTHON"))}
        if program.name == "ministack":
            words = [str(program)]
            env |= {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "SFTP_ENABLED": "0"}
            env |= {"SERVICES": "s3"}
        else:
            words = [str(program), "-H", "127.0.0.1", "-p", str(port)]
        log = self._folder / "s3server.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                words,
                cwd=self._folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait(log)
            self._make_bucket()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=30)

    def _wait(self, log: Path) -> None:
        deadline_s = time.monotonic() + _START_LIMIT_S
        process = self._process
        while process is not None and process.poll() is None and time.monotonic() < deadline_s:
            try:
                with urllib.request.urlopen(f"http://{self.address}", timeout=5):
                    return
            except urllib.error.HTTPError as error:
                error.close()
                return  # it answers
            except OSError:
                time.sleep(0.05)
        raise DrillError("The S3 server for the drill did not start.", todo=f"Look at {log}.")

    def _make_bucket(self) -> None:
        try:
            import boto3
        except ImportError:
            raise DrillError(
                "A drill on S3 needs boto3, which is not installed.",
                todo=install_extra("s3"),
            ) from None
        client = boto3.session.Session().client(
            "s3",
            endpoint_url=f"http://{self.address}",
            region_name="us-east-1",
            aws_access_key_id="drill",
            aws_secret_access_key="not-so-secret",
        )
        client.create_bucket(Bucket=BUCKET)


def _program() -> Path:
    folders = [os.environ.get(VARIABLE, ""), str(Path(sys.executable).parent)]
    for kind in _KINDS:
        found = [shutil.which(kind, path=folder) for folder in folders if folder]
        program = next(filter(None, [*found, shutil.which(kind)]), None)
        if program is not None:
            return Path(program)
    raise DrillError(
        "A drill on S3 needs a server, and neither ministack nor moto_server was found beside "
        f"Python, on PATH or in the folder that {VARIABLE} names.",
        todo="Make one in an environment of its own: python -m venv /opt/s3 && "
        "/opt/s3/bin/pip install ministack && export STATEBACKEND_SERVERS=/opt/s3/bin. Or give "
        "store= an s3:// URI, and settings={'s3_endpoint': 'http://host:port'}.",
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
