"""The fault proxy between boto3 and a real S3 server: what passes, is counted, and is seen.

Every test runs over HTTP and over TLS, where boto3 sends other requests (chunks with a trailer).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import urllib3
from botocore.exceptions import ClientError, ResponseStreamingError

from recovery.drill import Calm, Count, Facts, Fault, FaultProxy, Kind, Verb, stormy
from tests.recovery.drill.proxied import (
    BODY,
    CONNECTION_LOST,
    Stored,
    always,
    create,
    first,
    get,
    refusal,
)
from tests.support.servers import Certificates

pytestmark = pytest.mark.full  # each request over HTTP and over TLS

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
