"""What is sent to S3: how many requests an operation takes, and what is in them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import MagicMock

import botocore.exceptions
import pytest

from recovery.drill import Fault, FaultProxy, Verb
from snapshot.storage import ObjectStore, StoreOptions, open_store, probe
from snapshot.storage.s3.s3_retry import Retries
from statebackend.errors import StoreUnreachableError

if TYPE_CHECKING:
    from tests.support.s3 import S3
from tests.snapshot.faulty_s3 import *  # noqa: F403
from tests.snapshot.faulty_s3 import Deciding, first, through, verbs_of
from tests.snapshot.fresh_ids import new_id

pytestmark = pytest.mark.full  # thousands of objects on an S3 server

# --- what is sent --------------------------------------------------------------------------------


def test_a_small_write_or_read_is_one_request_without_detours(
    store: ObjectStore, proxy: FaultProxy
) -> None:
    plan = proxy.plan = Deciding()
    store.create("log/0", [b"x"])
    assert store.get_tail("log/0", 5) == (b"x", 1)
    store.get_range("log/0", 0, 1)
    assert verbs_of(proxy) == [Verb.PUT_IF, Verb.GET, Verb.GET]
    [put, *_] = plan.seen
    assert put.headers["if-none-match"] == "*"
    assert proxy.requests()[0].in_bytes == 1
    assert not {"expect", "x-amz-trailer", "transfer-encoding"} & put.headers.keys()
    assert not [name for name in put.headers if name.startswith("x-amz-checksum")]
    unsigned = put.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert unsigned == proxy.url.startswith("https")


def test_a_probe_costs_four_requests_and_leaves_nothing(
    store: ObjectStore, proxy: FaultProxy
) -> None:
    probe(store, new_id=new_id)
    assert len(proxy.requests()) == 4
    assert store.list("") == []


def test_encryption_is_asked_for_with_every_write(
    ministack: S3, proxy: FaultProxy, tmp_path: Path
) -> None:
    plan = proxy.plan = Deciding()
    store = through(ministack, proxy, sse="aws:kms", kms_key_id="alias/mine")
    (tmp_path / "large").write_bytes(bytes(65 << 20))
    store.put("a", [b"x"])
    store.create("b", [b"x"])
    store.put_file("c", tmp_path / "large")
    sealed = [
        request.headers["x-amz-server-side-encryption-aws-kms-key-id"]
        for request in plan.seen
        if request.headers.get("x-amz-server-side-encryption") == "aws:kms"
    ]
    assert sealed == ["alias/mine"] * 3  # two PUTs and the beginning of an upload in parts


def test_a_large_body_of_many_parts_arrives_whole_also_when_it_is_sent_twice(
    store: ObjectStore, proxy: FaultProxy
) -> None:
    parts = [bytes([number]) * 700_001 for number in range(20)] + [b""]
    proxy.plan = first(1, Fault.drop_before(), Verb.PUT)
    store.put("large", parts)
    assert len(proxy.requests()) == 2
    assert store.get("large") == b"".join(parts)


def test_a_thousand_names_are_deleted_with_one_request(
    ministack: S3, store: ObjectStore, proxy: FaultProxy
) -> None:
    store.put("data/a", [b"x"])
    store.delete([*(f"data/{number}" for number in range(1500)), "data/a"])
    assert verbs_of(proxy) == [Verb.PUT, Verb.DELETE_MANY, Verb.DELETE_MANY]
    assert store.list("") == []


def test_a_listing_goes_on_past_a_thousand(ministack: S3, store: ObjectStore) -> None:
    client = ministack.client()
    prefix = store.uri.removeprefix("s3://").partition("/")[2]
    for number in range(1005):
        client.put_object(Bucket=ministack.bucket, Key=f"{prefix}/data/{number:05}", Body=b"")
    client.put_object(Bucket=ministack.bucket, Key=f"{prefix}/data//odd", Body=b"")
    client.put_object(Bucket=ministack.bucket, Key=f"{prefix}-other/data/other", Body=b"")
    found = store.list("")
    assert [info.name for info in found] == [f"data/{number:05}" for number in range(1005)]


# --- forks ---------------------------------------------------------------------------------------


FORKER = """
import os, sys, uuid
from snapshot.storage import StoreOptions, open_store
url, uri, ca = sys.argv[1:]
store = open_store(uri, new_id=lambda: uuid.uuid4().hex,
                   options=StoreOptions(endpoint_url=url, region="us-east-1", ca_bundle=ca))
for number in range(10):
    store.put(f"d/{number}", [b"%d" % number * 1000])
def right(mine):
    for turn in range(20):
        number = (turn + mine) % 10
        if store.get(f"d/{number}") != b"%d" % number * 1000:
            return False
    return True
children = []
for child in range(3):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if right(child) else 3)
    children.append(pid)
good = right(5)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
assert good and codes == [0, 0, 0], (good, codes)
"""


@pytest.mark.parametrize("tls", [False, True])
def test_after_a_fork_parent_and_children_read_what_they_asked_for(
    ministack: S3, tls: bool
) -> None:
    options = ministack.options(tls=tls)
    done = subprocess.run(
        [
            *(sys.executable, "-c", FORKER),
            *(options.endpoint_url, ministack.fresh_uri(), options.ca_bundle),
        ],
        cwd=Path(__file__).parents[2],
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_store_that_is_let_go_closes_what_it_held(ministack: S3) -> None:
    store = open_store(ministack.fresh_uri(), new_id=new_id, options=ministack.options())
    store.list("")
    before = len(os.listdir("/proc/self/fd"))
    del store
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before


def test_the_environment_may_name_the_endpoint_and_the_authority(
    ministack: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", ministack.proxy.url)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(ministack.certificates.ca_bundle))
    store = open_store(ministack.fresh_uri(), new_id=new_id, options=StoreOptions())
    store.put("a", [b"x"])
    assert store.get("a") == b"x"


def test_an_error_says_what_botocore_said_without_its_chain() -> None:
    def operation(_: object) -> None:
        raise botocore.exceptions.NoCredentialsError

    retries = Retries(MagicMock(), uri="s3://b/j", deadline_s=1.0)
    with pytest.raises(StoreUnreachableError, match="Unable to locate credentials") as raised:
        retries.call("list", "", operation)
    assert raised.value.__suppress_context__


def test_each_try_after_the_first_is_counted_until_it_is_asked_for() -> None:
    failures = iter([True, True, False])

    def operation(_: object) -> str:
        if next(failures):
            raise botocore.exceptions.EndpointConnectionError(endpoint_url="http://b")
        return "there"

    retries = Retries(MagicMock(), uri="s3://b/j", deadline_s=60.0, sleep_s=lambda seconds: None)
    assert retries.call("read", "a", operation) == "there"
    assert (retries.take(), retries.take()) == (2, 0)


def test_a_server_that_has_answered_over_tls_will_again() -> None:
    """A proxy that starts anew may answer in plain HTTP for a moment."""
    no_tls = botocore.exceptions.SSLError(endpoint_url="b", error="[SSL: WRONG_VERSION_NUMBER]")
    answers = iter([no_tls, "there", no_tls, "there"])

    def operation(_: object) -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    retries = Retries(MagicMock(), uri="s3://b/j", deadline_s=60.0, sleep_s=lambda seconds: None)
    with pytest.raises(StoreUnreachableError, match="does not speak TLS"):
        retries.call("read", "a", operation)
    assert [retries.call("read", "a", operation) for _ in range(2)] == ["there", "there"]


def test_times_of_answers_are_read_as_botocore_reads_them() -> None:
    from botocore.utils import parse_timestamp

    from snapshot.storage.s3.s3_client import _timestamp

    for said in (
        "2026-11-28T06:37:34.000Z",
        "2026-11-28T06:37:34Z",
        "2026-11-28T06:37:34.123456789Z",  # some servers say more than Python's own parser takes
        "2026-11-28T08:37:34+02:00",
        "Sat, 28 Nov 2026 06:37:34 GMT",
        "1795848000",
        1795848000.5,
    ):
        assert _timestamp(said) == parse_timestamp(said)
    with pytest.raises(ValueError, match="Invalid"):
        _timestamp("noon, Z")
