"""The fault proxy between boto3 and a real S3 server: each fault is what it says, counts are exact.

Every test runs over HTTP and over TLS, where boto3 sends other requests (chunks with a trailer).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import urllib3
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    FlexibleChecksumError,
    ReadTimeoutError,
    ResponseStreamingError,
    SSLError,
)

from recovery.drill import Calm, Count, Facts, Fault, FaultProxy, Kind, Rule, Script, Verb, stormy
from tests.support.servers import Certificates

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


# --- without faults ------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [0, 1, 10_240, 3_000_001])
def test_objects_pass_unchanged(
    proxy: FaultProxy, client: Any, bucket: str, stored: Stored, size_bytes: int
) -> None:
    body = (BODY * (size_bytes // len(BODY) + 1))[:size_bytes]
    client.put_object(Bucket=bucket, Key="data/größe = 1+2%20", Body=body)
    assert stored("data/größe = 1+2%20") == body
    assert get(client, bucket, "data/größe = 1+2%20") == body
    assert proxy.requests()[-1].key == "data/größe = 1+2%20"


def test_the_servers_own_refusals_pass(client: Any, bucket: str) -> None:
    create(client, bucket)
    with pytest.raises(ClientError) as caught:
        create(client, bucket)
    assert refusal(caught.value) == (412, "PreconditionFailed")
    with pytest.raises(client.exceptions.NoSuchKey):
        get(client, bucket, "log/2")
    with pytest.raises(ClientError, match="404"):
        client.head_object(Bucket=bucket, Key="log/2")


def test_every_verb_is_counted_with_its_bytes(
    proxy: FaultProxy, client: Any, bucket: str, make_client: Callable[..., Any]
) -> None:
    plain = make_client(proxy, request_checksum_calculation="when_required")
    plain.put_object(Bucket=bucket, Key="job/data/a", Body=b"x" * 1000)
    plain.put_object(Bucket=bucket, Key="job/log/1", Body=b"y" * 10, IfNoneMatch="*")
    get(client, bucket, "job/data/a")
    get(client, bucket, "job/data/a", Range="bytes=0-9")
    client.head_object(Bucket=bucket, Key="job/data/a")
    client.list_objects_v2(Bucket=bucket, Prefix="job/log/")
    client.delete_object(Bucket=bucket, Key="job/data/a")
    client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "job/data/b"}]})
    upload = {"Bucket": bucket, "Key": "job/base/big"}
    upload["UploadId"] = client.create_multipart_upload(**upload)["UploadId"]
    parts = []
    for number in (1, 2):
        part = client.upload_part(**upload, PartNumber=number, Body=b"z" * 100)
        parts.append({"PartNumber": number, "ETag": part["ETag"]})
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    other = {"Bucket": bucket, "Key": "job/base/other"}
    other["UploadId"] = client.create_multipart_upload(**other)["UploadId"]
    client.abort_multipart_upload(**other)

    assert proxy.wait_idle(timeout_s=10)
    counts = proxy.counts()
    assert {name: count.requests for name, count in counts.items()} == {
        (Verb.PUT, "data/"): 1,
        (Verb.PUT_IF, "log/"): 1,
        (Verb.GET, "data/"): 2,
        (Verb.HEAD, "data/"): 1,
        (Verb.LIST, "log/"): 1,
        (Verb.DELETE, "data/"): 1,
        (Verb.DELETE_MANY, ""): 1,
        (Verb.UPLOAD_CREATE, "base/"): 2,
        (Verb.UPLOAD_PART, "base/"): 2,
        (Verb.UPLOAD_COMPLETE, "base/"): 1,
        (Verb.UPLOAD_ABORT, "base/"): 1,
    }
    assert counts[Verb.PUT, "data/"].in_bytes == 1000
    assert counts[Verb.GET, "data/"].out_bytes == 1010
    assert counts[Verb.HEAD, "data/"].out_bytes == 0
    everything = proxy.count()
    assert (everything.requests, everything.deliveries, everything.faulted) == (14, 14, 0)
    assert everything.duration_s > 0
    assert proxy.count(Verb.GET, Verb.HEAD, group="data/").requests == 3
    assert [entry.number for entry in proxy.requests()] == list(range(1, 15))
    proxy.reset()
    assert proxy.counts() == {}
    assert proxy.count() == Count()
    get(client, bucket, "job/log/1")
    assert [entry.number for entry in proxy.requests()] == [1]


def test_counts_are_exact_under_many_clients(
    proxy: FaultProxy, make_client: Callable[..., Any], bucket: str
) -> None:
    clients = [make_client(proxy) for _ in range(4)]

    def work(number: int) -> None:
        for index in range(15):
            create(clients[number], bucket, f"log/{number}-{index}", b"body")
            assert get(clients[number], bucket, f"log/{number}-{index}") == b"body"

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert proxy.count(Verb.PUT_IF, group="log/").requests == 60
    assert proxy.count(Verb.GET, group="log/").out_bytes == 240
    assert sorted(entry.number for entry in proxy.requests()) == list(range(1, 121))


def test_the_caller_may_group_keys_and_bound_the_memory(
    make_proxy: Callable[..., FaultProxy], make_client: Callable[..., Any], bucket: str
) -> None:
    proxy = make_proxy(group=lambda key: key.rpartition(".")[2], entries_max=2)
    client = make_client(proxy)
    for key in ("a.sst", "b.sst", "c.txt"):
        client.put_object(Bucket=bucket, Key=key, Body=b"")
    assert proxy.count(group="sst").requests == 2
    assert [entry.key for entry in proxy.requests()] == ["b.sst", "c.txt"]


def test_a_presigned_signature_is_not_kept(
    proxy: FaultProxy, client: Any, bucket: str, certificates: Certificates
) -> None:
    url = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "log/1"})
    assert "ignature" in url
    with urllib3.PoolManager(ca_certs=str(certificates.ca_bundle)) as pool:
        assert pool.request("GET", url).status == 404
    assert "ignature" not in repr(proxy.requests())
    assert proxy.requests()[-1].key == "log/1"


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


def differing_bits(left: bytes, right: bytes) -> int:
    assert len(left) == len(right)
    return sum((a ^ b).bit_count() for a, b in zip(left, right, strict=True))


# --- late and slow -------------------------------------------------------------------------------


# In the first case nothing needs to come within the time.
@pytest.mark.parametrize(("where", "read_timeout_s"), [("before", 0.5), ("response", 2.0)])
def test_a_stalled_read_runs_into_the_clients_timeout(
    proxy: FaultProxy,
    make_client: Callable[..., Any],
    bucket: str,
    where: Any,
    read_timeout_s: float,
) -> None:
    patient = make_client(proxy)
    create(patient, bucket)
    proxy.plan = first(Fault.stall(600, where))
    proxy.reset()
    with pytest.raises((ReadTimeoutError, ResponseStreamingError), match=r"[Tt]imed? ?out"):
        get(make_client(proxy, read_timeout_s=read_timeout_s), bucket)
    [entry] = proxy.requests()
    assert (entry.fault, entry.duration_s) == (Kind.STALL, None)
    assert entry.out_bytes == (len(BODY) // 2 if where == "response" else 0)
    assert get(patient, bucket) == BODY


def test_a_stalled_upload_is_not_there(
    proxy: FaultProxy, make_client: Callable[..., Any], bucket: str, stored: Stored
) -> None:
    client = make_client(proxy, read_timeout_s=0.3)
    proxy.plan = first(Fault.stall(600, "request"))
    with pytest.raises(ReadTimeoutError):
        create(client, bucket)
    proxy.stop()  # must not wait for the stall
    assert stored("log/1") is None


def test_a_short_stall_only_takes_time(
    proxy: FaultProxy, client: Any, bucket: str, stored: Stored
) -> None:
    for where in ("before", "request"):
        proxy.plan = always(Fault.stall(0.2, where))
        create(client, bucket, f"log/{where}")
        assert stored(f"log/{where}") == BODY
    assert proxy.wait_idle(timeout_s=10)
    assert all((entry.duration_s or 0) >= 0.2 for entry in proxy.requests())


def test_a_slow_request_keeps_to_its_rate(proxy: FaultProxy, client: Any, bucket: str) -> None:
    create(client, bucket)
    proxy.plan = always(Fault.slow(50_000))
    assert get(client, bucket) == BODY
    create(client, bucket, "log/2")
    assert proxy.wait_idle(timeout_s=10)
    slow = proxy.requests()[1:]
    assert all((entry.duration_s or 0) >= len(BODY) / 50_000 for entry in slow)
    assert [entry.fault for entry in slow] == [Kind.SLOW, Kind.SLOW]


def test_latency_and_bandwidth_hold_for_every_request_and_are_no_faults(
    proxy: FaultProxy, client: Any, bucket: str
) -> None:
    proxy.set_pace(latency_s=0.1, bytes_per_s=100_000)
    create(client, bucket)
    proxy.set_pace(latency_s=600)
    proxy.set_pace()
    assert get(client, bucket) == BODY  # the client would not wait so long
    assert proxy.wait_idle(timeout_s=10)
    slow, _ = proxy.requests()
    assert (slow.duration_s or 0) >= 0.1 + len(BODY) / 100_000
    assert proxy.count().faulted == 0


def test_a_held_put_lands_after_its_client_gave_up(
    proxy: FaultProxy, make_client: Callable[..., Any], bucket: str, stored: Stored
) -> None:
    client = make_client(proxy, read_timeout_s=0.3)
    proxy.plan = first(Fault.hold())
    with pytest.raises(ReadTimeoutError):
        create(client, bucket)
    assert proxy.wait_held(1, timeout_s=10)
    assert proxy.held() == [1]
    assert stored("log/1") is None
    assert proxy.release() == 1
    assert proxy.wait_idle(timeout_s=10)
    assert stored("log/1") == BODY
    [entry] = proxy.requests()
    assert (entry.fault, entry.deliveries) == (Kind.HOLD, 1)


def test_a_held_create_that_comes_too_late_changes_nothing(
    proxy: FaultProxy, make_client: Callable[..., Any], bucket: str, stored: Stored
) -> None:
    client = make_client(proxy, read_timeout_s=0.3)
    proxy.plan = first(Fault.hold())
    with pytest.raises(ReadTimeoutError):
        create(client, bucket)
    create(make_client(proxy), bucket, body=b"the successor's")
    proxy.release(proxy.held()[0])
    assert proxy.wait_idle(timeout_s=10)
    assert stored("log/1") == b"the successor's"


def test_a_held_request_is_answered_if_its_client_still_waits(
    proxy: FaultProxy, client: Any, bucket: str, stored: Stored
) -> None:
    proxy.plan = first(Fault.hold())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(create, client, bucket)
        assert proxy.wait_held(timeout_s=10)
        assert proxy.release(number=99) == 0
        assert proxy.release(number=1) == 1
        waiting.result(10)
    assert stored("log/1") == BODY


def test_what_is_held_when_the_proxy_stops_is_never_delivered(
    proxy: FaultProxy, client: Any, bucket: str, stored: Stored
) -> None:
    proxy.plan = first(Fault.hold())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(create, client, bucket)
        assert proxy.wait_held(timeout_s=10)
        proxy.stop()
        with pytest.raises(CONNECTION_LOST):
            waiting.result(10)
    assert stored("log/1") is None


def test_while_down_nothing_passes_and_all_of_it_counts(
    proxy: FaultProxy, client: Any, bucket: str, stored: Stored
) -> None:
    create(client, bucket)
    proxy.go_down()
    for _ in range(3):
        with pytest.raises(CONNECTION_LOST):
            get(client, bucket)
    with pytest.raises(CONNECTION_LOST):
        create(client, bucket, "log/2")
    proxy.come_up()
    assert get(client, bucket) == BODY
    assert stored("log/2") is None
    faults = [entry.fault for entry in proxy.requests()]
    assert faults == [None, Kind.DOWN, Kind.DOWN, Kind.DOWN, Kind.DOWN, None]


# --- seeds ---------------------------------------------------------------------------------------


def test_the_same_seed_does_the_same_to_the_same_requests(
    make_proxy: Callable[..., FaultProxy], make_client: Callable[..., Any], bucket: str
) -> None:
    def drill(seed: int, name: str) -> Sequence[tuple[Kind | None, int, int]]:
        proxy = make_proxy(stormy(0.5), seed=seed)
        client = make_client(proxy)
        for index in range(25):
            for call in (
                lambda key: create(client, bucket, key),
                lambda key: get(client, bucket, key),
                lambda key: client.list_objects_v2(Bucket=bucket, Prefix=key),
            ):
                try:
                    call(f"{name}/log/{index}")
                except (ClientError, *CONNECTION_LOST, ResponseStreamingError):
                    continue
        assert proxy.wait_idle(timeout_s=10)
        return [(entry.fault, entry.status, entry.deliveries) for entry in proxy.requests()]

    first_time = drill(7, "a")
    assert drill(7, "b") == first_time
    assert [fault for fault, _, _ in drill(8, "c")] != [fault for fault, _, _ in first_time]
    assert sum(fault is not None for fault, _, _ in first_time) > 15


def test_a_plan_can_be_changed_while_requests_run(
    proxy: FaultProxy, client: Any, bucket: str
) -> None:
    proxy.plan = always(Fault.refuse(), Verb.PUT_IF)
    with pytest.raises(ClientError):
        create(client, bucket)
    proxy.plan = Calm()
    create(client, bucket)


def test_stopping_twice_and_under_load_ends_every_thread(
    make_proxy: Callable[..., FaultProxy], make_client: Callable[..., Any], bucket: str
) -> None:
    before = set(threading.enumerate())  # the proxies of the session's servers among them
    proxy = make_proxy(first(Fault.stall(600)))
    client = make_client(proxy)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(create, client, bucket)
        while not proxy.requests():
            pass
        proxy.stop()
        proxy.stop()
        with pytest.raises(CONNECTION_LOST):
            waiting.result(10)
    after = set(threading.enumerate()) - before
    assert not [thread for thread in after if thread.name.startswith("drill-")]


# --- what a plan sees, and answers of its own ----------------------------------------------------


def test_a_plan_sees_the_headers_and_nobody_else_does(
    proxy: FaultProxy, client: Any, bucket: str
) -> None:
    seen: list[Facts] = []

    class Looking:
        def decide(self, facts: Facts, *, seed: int) -> Fault | None:
            seen.append(facts)
            return None

    proxy.plan = Looking()
    create(client, bucket)
    (facts,) = seen
    assert facts.headers["if-none-match"] == "*"
    assert "Signature=" in facts.headers["authorization"]
    assert "Signature" not in repr(facts) + repr(proxy.requests())


def test_a_body_of_the_plan_s_own_is_answered_in_place_of_the_server_s(
    proxy: FaultProxy, client: Any, bucket: str, stored: Stored
) -> None:
    proxy.plan = first(Fault.say(b"<Error><Code>Odd</Code></Error>", 418))
    with pytest.raises(ClientError) as caught:
        create(client, bucket)
    assert refusal(caught.value) == (418, "Odd")
    assert stored("log/1") is None
    listing = b"<ListBucketResult><KeyCount>7</KeyCount></ListBucketResult>"
    proxy.plan = always(Fault.say(listing), Verb.LIST)
    assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 7
    assert proxy.count().deliveries == 0
