"""The fault proxy refuses, drops, loses or damages a request or its answer, and does what it says.

Every test runs over HTTP and over TLS, where boto3 sends other requests (chunks with a trailer).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError, FlexibleChecksumError, ResponseStreamingError

from recovery.drill import Fault, FaultProxy, Kind, Rule, Script, Verb
from tests.recovery.drill.proxied import (
    BODY,
    CONNECTION_LOST,
    Stored,
    always,
    create,
    differing_bits,
    first,
    get,
    refusal,
)

pytestmark = pytest.mark.full  # an S3 server behind a proxy that damages

# --- refused, dropped, lost ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault.refuse(), (503, "SlowDown")),
        (Fault.refuse(500, "InternalError"), (500, "InternalError")),
        (Fault.refuse(409, "ConditionalRequestConflict"), (409, "ConditionalRequestConflict")),
        (Fault.expired_token(), (400, "ExpiredToken")),
    ],
)
def test_a_refused_request_never_reaches_the_server(
    proxy: FaultProxy,
    client: Any,
    bucket: str,
    stored: Stored,
    fault: Fault,
    expected: tuple[int, str],
) -> None:
    proxy.plan = first(fault)
    with pytest.raises(ClientError) as caught:
        create(client, bucket)
    assert refusal(caught.value) == expected
    assert stored("log/1") is None
    create(client, bucket)
    refused, passed = proxy.requests()
    assert (refused.status, refused.fault, refused.deliveries) == (expected[0], Kind.STATUS, 0)
    assert (passed.status, passed.fault, passed.deliveries) == (200, None, 1)
    count = proxy.count(Verb.PUT_IF, group="log/")
    assert (count.requests, count.faulted) == (2, 1)


def test_a_refused_read_is_an_error_and_a_refused_head_has_no_body(
    proxy: FaultProxy, client: Any, bucket: str
) -> None:
    create(client, bucket)
    proxy.plan = Script(Rule(fault=Fault.refuse(), nth={1}, verbs={Verb.GET, Verb.HEAD}))
    with pytest.raises(ClientError, match="503"):
        client.head_object(Bucket=bucket, Key="log/1")
    assert client.head_object(Bucket=bucket, Key="log/1")["ContentLength"] == len(BODY)
    with pytest.raises(ClientError, match="SlowDown"):
        get(client, bucket)
    assert get(client, bucket) == BODY


def test_a_connection_dropped_before_forwarding_leaves_nothing(
    proxy: FaultProxy, client: Any, bucket: str, stored: Stored
) -> None:
    proxy.plan = first(Fault.drop_before())
    with pytest.raises(CONNECTION_LOST):
        create(client, bucket)
    assert stored("log/1") is None
    create(client, bucket)
    assert [(e.status, e.fault) for e in proxy.requests()] == [(0, Kind.DROP_BEFORE), (200, None)]


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.99])
def test_a_body_dropped_in_the_middle_leaves_nothing(
    proxy: FaultProxy, client: Any, bucket: str, stored: Stored, fraction: float
) -> None:
    proxy.plan = first(Fault.drop_in_request(fraction))
    with pytest.raises(CONNECTION_LOST):
        create(client, bucket, body=BODY * 100)
    assert stored("log/1") is None
    [entry] = proxy.requests()
    assert (entry.fault, entry.deliveries, entry.status) == (Kind.DROP_IN_REQUEST, 0, 0)
    create(client, bucket, body=BODY * 100)
    assert stored("log/1") == BODY * 100


def test_a_lost_answer_means_that_the_server_has_done_it(
    proxy: FaultProxy, client: Any, bucket: str, stored: Stored
) -> None:
    proxy.plan = first(Fault.lose_answer())
    with pytest.raises(CONNECTION_LOST):
        create(client, bucket)
    assert stored("log/1") == BODY
    with pytest.raises(ClientError, match="PreconditionFailed"):
        create(client, bucket)
    lost, _ = proxy.requests()
    assert (lost.fault, lost.deliveries, lost.status) == (Kind.LOSE_ANSWER, 1, 0)


@pytest.mark.parametrize("answer", [1, 2])
def test_a_doubled_create_is_done_once_and_answered_as_chosen(
    proxy: FaultProxy, client: Any, bucket: str, stored: Stored, answer: int
) -> None:
    proxy.plan = first(Fault.duplicate(answer))
    body = BODY * 300  # over what is kept in memory
    if answer == 1:
        create(client, bucket, body=body)
    else:
        with pytest.raises(ClientError, match="PreconditionFailed"):
            create(client, bucket, body=body)
    assert stored("log/1") == body
    [entry] = proxy.requests()
    assert (entry.fault, entry.deliveries) == (Kind.DUPLICATE, 2)
    assert entry.status == (200 if answer == 1 else 412)
    assert get(client, bucket) == body  # the connection is still in order


# --- damaged -------------------------------------------------------------------------------------


def test_a_truncated_answer_ends_with_its_connection(
    proxy: FaultProxy, client: Any, bucket: str
) -> None:
    create(client, bucket)
    proxy.plan = first(Fault.truncate(0.25))
    with pytest.raises(ResponseStreamingError, match=str(len(BODY) // 4)):
        get(client, bucket)
    entry = proxy.requests()[-1]
    assert (entry.fault, entry.out_bytes) == (Kind.TRUNCATE, len(BODY) // 4)
    assert get(client, bucket) == BODY


def test_a_shortened_answer_looks_whole_to_who_checks_no_digest(
    proxy: FaultProxy, make_client: Callable[..., Any], bucket: str
) -> None:
    trusting = make_client(proxy, response_checksum_validation="when_required")
    create(trusting, bucket)
    proxy.plan = first(Fault.truncate(0.25, fixed_length=True))
    assert get(trusting, bucket) == BODY[: len(BODY) // 4]
    assert get(trusting, bucket) == BODY
    proxy.reset()
    with pytest.raises(FlexibleChecksumError):
        get(make_client(proxy), bucket)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.999])
def test_one_bit_of_an_answer_is_flipped(
    proxy: FaultProxy, make_client: Callable[..., Any], bucket: str, fraction: float
) -> None:
    trusting = make_client(proxy, response_checksum_validation="when_required")
    create(trusting, bucket)
    proxy.plan = first(Fault.corrupt_response(fraction))
    found = get(trusting, bucket)
    assert differing_bits(found, BODY) == 1
    assert found[int(len(BODY) * fraction)] != BODY[int(len(BODY) * fraction)]
    proxy.reset()
    with pytest.raises(FlexibleChecksumError):
        get(make_client(proxy), bucket)


def test_an_answer_without_a_body_cannot_be_damaged_and_counts_as_unharmed(
    proxy: FaultProxy, client: Any, bucket: str, stored: Stored
) -> None:
    for number, fault in enumerate(
        [Fault.truncate(), Fault.truncate(fixed_length=True), Fault.corrupt_response()]
    ):
        proxy.plan = always(fault)
        create(client, bucket, f"log/{number}")
        assert client.head_object(Bucket=bucket, Key=f"log/{number}")["ContentLength"] == len(BODY)
    assert proxy.count().faulted == 0


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.999])
def test_a_flipped_bit_on_the_way_up_is_refused_by_the_server(
    proxy: FaultProxy, client: Any, bucket: str, stored: Stored, fraction: float
) -> None:
    proxy.plan = first(Fault.corrupt_request(fraction))
    with pytest.raises(ClientError) as caught:
        create(client, bucket)
    assert refusal(caught.value) == (400, "BadDigest")
    assert stored("log/1") is None
    assert proxy.requests()[-1].fault is Kind.CORRUPT_REQUEST


def test_a_flipped_bit_lands_where_no_digest_was_sent(
    proxy: FaultProxy, make_client: Callable[..., Any], bucket: str, stored: Stored
) -> None:
    careless = make_client(proxy, request_checksum_calculation="when_required")
    proxy.plan = first(Fault.corrupt_request())
    create(careless, bucket)
    found = stored("log/1")
    assert found is not None
    assert differing_bits(found, BODY) == 1
