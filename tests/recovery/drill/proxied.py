"""Requests through the fault proxy, and faults for the first of them or for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from botocore.exceptions import ClientError, ConnectionClosedError, SSLError

from recovery.drill import Fault, Rule, Script, Verb

BODY = bytes(range(256)) * 40

# Over TLS a reset can surface as "EOF in violation of protocol".
CONNECTION_LOST = (ConnectionClosedError, SSLError)

Stored = Callable[[str], bytes | None]


def always(fault: Fault, *verbs: Verb) -> Script:
    return Script(Rule(fault=fault, verbs=verbs or None))


def first(fault: Fault) -> Script:
    return Script(Rule(fault=fault, nth={1}))


def get(client: Any, bucket: str, key: str = "log/1", **options: Any) -> bytes:
    body: bytes = client.get_object(Bucket=bucket, Key=key, **options)["Body"].read()
    return body


def create(client: Any, bucket: str, key: str = "log/1", body: bytes = BODY) -> None:
    client.put_object(Bucket=bucket, Key=key, Body=body, IfNoneMatch="*")


def refusal(error: ClientError) -> tuple[int, str]:
    found = error.response
    return found["ResponseMetadata"]["HTTPStatusCode"], found["Error"]["Code"]


def differing_bits(left: bytes, right: bytes) -> int:
    assert len(left) == len(right)
    return sum((a ^ b).bit_count() for a, b in zip(left, right, strict=True))
