"""A real S3 server with the fault proxy in front of it, over HTTP and over TLS."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from botocore.config import Config

from recovery.drill import FaultPlan, FaultProxy
from tests.support.s3 import S3
from tests.support.servers import Certificates

MakeClient = Callable[..., Any]
MakeProxy = Callable[..., FaultProxy]


@pytest.fixture
def upstream(ministack: S3) -> str:
    """The server's `host:port`."""
    return ministack.plain_url.removeprefix("http://")


@pytest.fixture(params=["http", "https"])
def make_proxy(
    request: pytest.FixtureRequest, upstream: str, certificates: Certificates
) -> Iterator[MakeProxy]:
    """Starts proxies, which end with the test."""
    with contextlib.ExitStack() as stack:

        def make(plan: FaultPlan | None = None, **options: Any) -> FaultProxy:
            tls = certificates.server if request.param == "https" else None
            return stack.enter_context(FaultProxy(upstream, plan=plan, tls=tls, **options))

        yield make


@pytest.fixture
def proxy(make_proxy: MakeProxy) -> FaultProxy:
    """One proxy that does no harm yet."""
    return make_proxy()


@pytest.fixture
def make_client(certificates: Certificates) -> Iterator[MakeClient]:
    """Makes boto3 clients that never try twice."""
    with contextlib.ExitStack() as stack:

        def make(proxy: FaultProxy, *, read_timeout_s: float = 10.0, **options: Any) -> Any:
            config = Config(
                retries={"total_max_attempts": 1},
                connect_timeout=10,
                read_timeout=read_timeout_s,
                **options,
            )
            client = boto3.client(
                "s3",
                endpoint_url=proxy.url,
                region_name="us-east-1",
                verify=str(certificates.ca_bundle),
                config=config,
            )
            stack.callback(client.close)
            return client

        yield make


@pytest.fixture
def client(proxy: FaultProxy, make_client: MakeClient) -> Any:
    """A client of `proxy`."""
    return make_client(proxy)


@pytest.fixture
def bucket(ministack: S3) -> str:
    """A new bucket, made past the proxy."""
    name = f"drill-{uuid.uuid4().hex}"
    with contextlib.closing(ministack.client()) as client:
        client.create_bucket(Bucket=name)
    return name


@pytest.fixture
def stored(ministack: S3, bucket: str) -> Iterator[Callable[[str], bytes | None]]:
    """Reads a key of the bucket past the proxy; None if it is not there."""
    with contextlib.closing(ministack.client()) as client:

        def read(key: str) -> bytes | None:
            try:
                body: bytes = client.get_object(Bucket=bucket, Key=key)["Body"].read()
            except client.exceptions.NoSuchKey:
                return None
            return body

        yield read
