"""Commit logs on S3, and what stands in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from blake3 import blake3

from recovery.drill import FaultProxy
from snapshot.formats.record import Manifest, Record, SliceEntry, parse_record
from snapshot.log.commit_log import CommitLog
from snapshot.storage import ObjectStore
from statebackend.errors import StateBackendError
from tests.snapshot.logs import new_id
from tests.support.s3 import S3

__all__ = ["proxy"]


def slice_of(epoch: int, body: bytes) -> SliceEntry:
    return SliceEntry(
        operator="op",
        subtask=0,
        kind="delta",
        epoch=epoch,
        key_group_start=0,
        key_group_end=127,
        attempt=0,
        rows=1,
        size_bytes=len(body),
        digest=blake3(body).hexdigest(),
        chain="",
    )


def checkpoint(epoch: int, body: bytes, oldest_needed: int = 0) -> Manifest:
    return Manifest(
        kind="checkpoint",
        job="",
        job_id="",
        generation=0,
        sequence=0,
        writer="",
        write_id="",
        oldest_needed=oldest_needed,
        epoch=epoch,
        slices=[slice_of(epoch, body)],
    )


class Tries:
    """Patience without a clock: the same write again, this many times."""

    def __init__(self, count: int) -> None:
        self._count = count

    def wait(self, attempt: int, error: StateBackendError) -> bool:
        return attempt <= self._count


def log_on(store: ObjectStore, writer: str, tries: int = 0) -> CommitLog:
    return CommitLog(store, job="clicks", writer=writer, new_id=new_id, patience=Tries(tries))


def raw_records(server: S3, uri: str) -> dict[int, tuple[bytes, Record]]:
    """Every record by its number, read past the proxy and past the store and the log."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    with contextlib.closing(server.client()) as client:
        found = {}
        pages = client.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, Prefix=f"{prefix}/log/"
        )
        for item in (item for page in pages for item in page.get("Contents", [])):
            name = item["Key"].removeprefix(f"{prefix}/")
            data = client.get_object(Bucket=bucket, Key=item["Key"])["Body"].read()
            number = int(name.removeprefix("log/").removesuffix(".ckpt"))
            found[number] = (data, parse_record(data, name))
    return found


@pytest.fixture
def proxy(ministack: S3) -> Iterator[FaultProxy]:
    address = ministack.plain_url.removeprefix("http://")
    with FaultProxy(address, tls=ministack.certificates.server) as proxy:
        yield proxy
