"""Fixtures: S3 servers, plain and over TLS, each started once and only when asked for.

Import them into a conftest: `from tests.support.s3 import *  # noqa: F403`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from recovery.drill.proxy.fault_proxy import FaultProxy
from snapshot.storage import StoreOptions
from tests.support.ceph import start_ceph
from tests.support.servers import Certificates, make_certificates, start_server

__all__ = ["S3", "aws_environment", "ceph", "certificates", "ministack", "moto", "start_s3"]

BUCKET = "state"
_prefixes = itertools.count()


def host_of(url: str) -> str:
    """The `host:port` of a server."""
    return urlsplit(url).netloc


@dataclass(frozen=True)
class S3:
    """A server with a bucket, and how it is reached."""

    kind: str
    plain_url: str
    proxy: FaultProxy  # speaks TLS
    certificates: Certificates
    bucket: str = BUCKET

    def options(self, *, tls: bool = False, **given: Any) -> StoreOptions:
        """Straight to the server, or over TLS through the proxy."""
        if tls:
            return replace(self.through(self.proxy), **given)
        return StoreOptions(endpoint_url=self.plain_url, region="us-east-1", **given)

    def through(self, proxy: FaultProxy) -> StoreOptions:
        """By way of a proxy, with a short patience."""
        return StoreOptions(
            endpoint_url=proxy.url,
            region="us-east-1",
            ca_bundle=str(self.certificates.ca_bundle),
        )

    def fresh_uri(self) -> str:
        """A place where nothing is yet."""
        return f"s3://{self.bucket}/place-{os.getpid()}-{next(_prefixes)}"

    def faulty(self, *, tls: bool = True) -> FaultProxy:
        """A proxy of the test's own; it starts and stops as a context manager."""
        return FaultProxy(host_of(self.plain_url), tls=self.certificates.server if tls else None)

    def client(self) -> Any:
        """A plain client beside the store's, to look at what it left."""
        import boto3

        return boto3.session.Session().client(
            "s3", endpoint_url=self.plain_url, region_name="us-east-1"
        )


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def aws_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Credentials that mean nothing, and none of this machine's own."""
    nowhere = tmp_path_factory.mktemp("aws")
    given = {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "not-so-secret",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "AWS_CONFIG_FILE": str(nowhere / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(nowhere / "credentials"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in given.items():
            patch.setenv(name, value)
        yield


@contextlib.contextmanager
def start_s3(kind: str, folder: Path, certificates: Certificates) -> Iterator[S3]:
    """A server, its bucket and a TLS proxy in front of it; all end with the context."""
    server = start_server(kind, folder)
    try:
        with _with_proxy(kind, server.url, certificates) as found:
            yield found
    finally:
        server.stop()


@contextlib.contextmanager
def _with_proxy(kind: str, url: str, certificates: Certificates) -> Iterator[S3]:
    with FaultProxy(host_of(url), tls=certificates.server) as proxy:
        found = S3(kind, url, proxy, certificates)
        found.client().create_bucket(Bucket=found.bucket)
        yield found


def _fixture(kind: str) -> Callable[..., Iterator[S3]]:
    def run(
        tmp_path_factory: pytest.TempPathFactory,
        certificates: Certificates,
        aws_environment: None,
    ) -> Iterator[S3]:
        with start_s3(kind, tmp_path_factory.mktemp(kind), certificates) as found:
            yield found

    return run


ministack = pytest.fixture(scope="session", name="ministack")(_fixture("ministack"))
moto = pytest.fixture(scope="session", name="moto")(_fixture("moto"))


@pytest.fixture(scope="session")
def ceph(certificates: Certificates, aws_environment: None) -> Iterator[S3]:
    """A gateway of Ceph's; it checks signatures and clocks, as Amazon does. Takes 20 s."""
    folder = Path(tempfile.mkdtemp(prefix="ceph-"))
    keys = (os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
    server = start_ceph(folder, *keys)
    try:
        with _with_proxy("ceph", server.url, certificates) as found:
            yield found
    finally:
        server.stop()
