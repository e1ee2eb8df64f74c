"""S3 when things go wrong: real servers behind a proxy that loses, breaks and refuses."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import time
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import botocore.exceptions
import pytest

from recovery.drill import Facts, Fault, FaultProxy, Rule, Script, Verb
from snapshot.storage import CreateOutcome, ObjectStore, StoreOptions, open_store, probe
from snapshot.storage.counting import CountingStore
from snapshot.storage.s3.s3_client import TRIES
from snapshot.storage.s3.s3_retry import Retries
from statebackend.errors import (
    LocalCopyError,
    ObjectNotFoundError,
    SettingError,
    StoreCapabilityError,
    StoreUnreachableError,
)

if TYPE_CHECKING:
    from tests.support.s3 import S3


def new_id() -> str:
    return uuid.uuid4().hex


@pytest.fixture(params=["plain", "tls"])
def proxy(ministack: S3, request: pytest.FixtureRequest) -> Iterator[FaultProxy]:
    with ministack.faulty(tls=request.param == "tls") as found:
        yield found


@pytest.fixture
def store(ministack: S3, proxy: FaultProxy) -> ObjectStore:
    return through(ministack, proxy)


def through(s3: S3, proxy: FaultProxy, **given: Any) -> ObjectStore:
    options = replace(s3.through(proxy), **{"deadline_s": 30.0, "read_timeout_s": 5.0, **given})
    return open_store(s3.fresh_uri(), new_id=new_id, options=options)


def first(count: int, fault: Fault, *verbs: Verb) -> Script:
    """The first requests of each of these verbs (none given: of every one) meet the fault."""
    return Script(Rule(fault=fault, verbs=verbs or None, nth=range(1, count + 1)))


def error(status: int, code: str, message: str) -> Fault:
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Fault.say(body.encode(), status)


class Deciding:
    """A plan that asks a function, and remembers what it was told of every request."""

    def __init__(self, decide: Callable[[Facts], Fault | None] = lambda facts: None) -> None:
        self.seen: list[Facts] = []
        self._decide = decide

    def decide(self, facts: Facts, *, seed: int) -> Fault | None:
        self.seen.append(facts)
        return self._decide(facts)


def verbs_of(proxy: FaultProxy) -> list[Verb]:
    return [entry.verb for entry in proxy.requests()]


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
    client.put_object(Bucket=ministack.bucket, Key=f"{prefix}2/data/other", Body=b"")
    found = store.list("")
    assert [info.name for info in found] == [f"data/{number:05}" for number in range(1005)]


# --- answers that never come ---------------------------------------------------------------------


def test_a_create_whose_answer_was_lost_says_that_the_object_exists(
    store: ObjectStore, proxy: FaultProxy
) -> None:
    proxy.plan = first(1, Fault.lose_answer(), Verb.PUT_IF)
    assert store.create("log/0", [b"mine"]) is CreateOutcome.EXISTS
    assert store.get("log/0") == b"mine"


def test_a_create_that_is_never_answered_is_unknown_and_not_a_failure(
    ministack: S3, proxy: FaultProxy
) -> None:
    store = through(ministack, proxy, deadline_s=0.5)
    proxy.plan = first(999, Fault.lose_answer(), Verb.PUT_IF)
    with pytest.raises(StoreUnreachableError, match=r"tried for"):
        store.create("log/0", [b"mine"])
    assert store.get("log/0") == b"mine"


@pytest.mark.parametrize(
    "fault",
    [
        *(Fault.drop_before(), Fault.refuse(500, "InternalError"), Fault.refuse()),
        Fault.refuse(409, "ConditionalRequestConflict"),
        Fault.refuse(409, "OperationAborted"),
        Fault.refuse(400, "BadDigest"),
        Fault.refuse(400, "RequestTimeout"),
    ],
)
def test_what_may_pass_is_tried_again(store: ObjectStore, proxy: FaultProxy, fault: Fault) -> None:
    proxy.plan = first(2, fault)
    assert store.create("log/0", [b"mine"]) is CreateOutcome.CREATED
    assert len(proxy.requests()) == 3


def test_what_may_pass_is_tried_more_often_than_botocore_would(ministack: S3) -> None:
    with ministack.faulty() as proxy:
        store = through(ministack, proxy, deadline_s=30.0)
        proxy.plan = first(6, Fault.refuse(409, "OperationAborted"), Verb.PUT)
        store.put("b", [b"x"])
        assert store.get("b") == b"x"


def test_the_deadline_holds_while_botocore_tries_again(ministack: S3, proxy: FaultProxy) -> None:
    store = through(ministack, proxy, deadline_s=0.3)
    proxy.plan = first(999, Fault.refuse(503, "SlowDown"))
    with pytest.raises(StoreUnreachableError, match=r"SlowDown.* of 0\.3\)"):
        store.get("a")
    assert len(proxy.requests()) < TRIES


def test_a_probe_of_an_endpoint_that_refuses_is_given_up_soon_and_warned_of(
    aws_environment: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("snapshot.storage.open.PROBE_DEADLINE_S", 3.0)
    endpoint = "http://127.0.0.1:9"  # nobody listens there
    options = StoreOptions(endpoint_url=endpoint, region="us-east-1", deadline_s=600.0)
    store = CountingStore(open_store("s3://state/x", new_id=new_id, options=options))
    before_s = time.monotonic()
    with pytest.raises(StoreUnreachableError, match=r"EndpointConnectionError.* of 3\)"):
        probe(store, new_id=new_id)
    assert time.monotonic() - before_s < 100  # botocore's own pauses may overrun it
    warnings = [record.getMessage() for record in caplog.records]
    assert len([text for text in warnings if endpoint in text and "create" in text]) == 1


def test_a_shorter_patience_is_for_one_thread_and_never_longer(
    ministack: S3, proxy: FaultProxy
) -> None:
    store = through(ministack, proxy, deadline_s=0.2)
    store.list("")
    proxy.plan = first(999, Fault.refuse())
    for asked_s, given_s in ((0.1, "0.1"), (5.0, "0.2")):
        with (
            store.limited(asked_s),
            pytest.raises(StoreUnreachableError, match=rf"of {given_s}\)"),
        ):
            store.get("a")
    with store.limited(0.1), ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(store.get, "a").exception()
    assert "of 0.2)" in str(elsewhere)


def test_a_store_that_nobody_listens_at_is_named(ministack: S3, proxy: FaultProxy) -> None:
    store = through(ministack, proxy, deadline_s=0.3)
    proxy.stop()
    with pytest.raises(StoreUnreachableError, match="EndpointConnectionError") as caught:
        store.get("a")
    assert store.uri in caught.value.what


# --- bodies that break off -----------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0, 1e-5, 0.7])
def test_a_body_that_breaks_off_is_read_again(
    store: ObjectStore, proxy: FaultProxy, fraction: float
) -> None:
    body = bytes(range(256)) * 1000
    store.put("a", [body])
    for read, expected in (
        (lambda: store.get("a"), body),
        (lambda: store.get_range("a", 5, 200_000), body[5:200_005]),
        (lambda: store.get_tail("a", 200_000), (body[-200_000:], len(body))),
    ):
        proxy.reset()
        proxy.plan = first(2, Fault.truncate(fraction), Verb.GET)
        assert read() == expected
        assert len(proxy.requests()) == 3


def test_a_stream_that_breaks_off_goes_on_where_it_broke(
    store: ObjectStore, proxy: FaultProxy
) -> None:
    body = os.urandom(1_000_000)
    store.put("a", [body])

    def after_250_000(facts: Facts) -> Fault | None:
        left = len(body) - 200_000 * (facts.nth - 1)
        return Fault.truncate(250_000 / left) if facts.nth <= 3 else None

    plan = proxy.plan = Deciding(after_250_000)
    assert b"".join(store.get_chunks("a", 100_000)) == body
    ranges = [request.headers.get("range") for request in plan.seen]
    assert ranges == [None, "bytes=200000-", "bytes=400000-", "bytes=600000-"]


def test_a_stream_does_not_go_on_in_another_version(store: ObjectStore, proxy: FaultProxy) -> None:
    store.put("a", [b"a" * 1_000_000])
    proxy.plan = first(1, Fault.truncate(0.5), Verb.GET)
    chunks = store.get_chunks("a", 100_000)
    assert next(chunks) == b"a" * 100_000
    store.put("a", [b"b" * 1_000_000])
    with pytest.raises(StoreUnreachableError, match="replaced"):
        list(chunks)


LOST = [
    Fault.truncate(0.0),
    Fault.truncate(0.0, fixed_length=True),
    Fault.truncate(0.5),
    Fault.truncate(0.5, fixed_length=True),
    Fault.say(b"<html><body>the server is being repaired</body></html>"),
]


@pytest.mark.parametrize("fault", LOST)
def test_a_listing_whose_body_was_lost_is_asked_for_again(
    store: ObjectStore, proxy: FaultProxy, fault: Fault
) -> None:
    for number in range(3):
        store.put(f"data/{number}", [b"x"])
    proxy.plan = first(2, fault, Verb.LIST)
    assert [info.name for info in store.list("data/")] == ["data/0", "data/1", "data/2"]
    assert proxy.count(Verb.LIST).requests == 3


def test_a_listing_whose_second_page_was_lost_is_whole(
    ministack: S3, store: ObjectStore, proxy: FaultProxy
) -> None:
    client = ministack.client()
    prefix = store.uri.removeprefix("s3://").partition("/")[2]
    for number in range(1002):
        client.put_object(Bucket=ministack.bucket, Key=f"{prefix}/data/{number:05}", Body=b"")
    lost = Fault.truncate(0.0)
    proxy.plan = Script(Rule(fault=lost, verbs={Verb.LIST}, nth={2}))
    assert len(store.list("")) == 1002


@pytest.mark.parametrize("fault", LOST[:-1])
def test_a_deletion_whose_answer_was_lost_is_asked_for_again(
    store: ObjectStore, proxy: FaultProxy, fault: Fault
) -> None:
    store.put("a", [b"x"])
    proxy.plan = first(1, fault, Verb.DELETE_MANY)
    store.delete(["a", "b", "a"])
    assert proxy.count(Verb.DELETE_MANY).requests == 2
    assert store.list("") == []


def test_a_deletion_that_was_refused_in_an_answer_that_was_lost_is_not_taken_for_done(
    ministack: S3, proxy: FaultProxy
) -> None:
    store = through(ministack, proxy, deadline_s=0.3)
    proxy.plan = first(99, Fault.say(b""), Verb.DELETE_MANY)
    with pytest.raises(StoreUnreachableError, match="no whole answer"):
        store.delete(["a"])


@pytest.mark.parametrize("fault", LOST)
def test_an_upload_in_parts_that_was_begun_without_an_answer_is_begun_again(
    ministack: S3, fault: Fault, large_file: Path
) -> None:
    with ministack.faulty(tls=False) as proxy:
        store = through(ministack, proxy)
        proxy.plan = first(1, fault, Verb.UPLOAD_CREATE)
        store.put_file("base/file", large_file)
        assert [info.size_bytes for info in store.list("")] == [70 << 20]


@pytest.mark.parametrize("body", [b"", b"<html>not found</html>", b"<Error><Code>NoSuchKey</Co"])
def test_a_refusal_that_does_not_say_what_is_missing_is_no_absence(
    ministack: S3, proxy: FaultProxy, body: bytes
) -> None:
    """A server that is not S3 at all says 404, too."""
    store = through(ministack, proxy)
    store.put("a", [b"x"])
    proxy.reset()
    proxy.plan = first(1, Fault.say(body, 404), Verb.GET)
    assert store.get("a") == b"x"
    proxy.plan = first(99, Fault.say(body, 404))
    for call in (
        lambda: store.get("a"),
        lambda: store.get_tail("a", 1),
        lambda: list(store.get_chunks("a")),
    ):
        with store.limited(0.3), pytest.raises(StoreUnreachableError, match="tried for"):
            call()


@pytest.mark.parametrize("status", [400, 403, 409])
def test_a_refusal_whose_reason_was_lost_is_asked_for_again(
    store: ObjectStore, proxy: FaultProxy, status: int
) -> None:
    proxy.plan = first(1, Fault.say(b"", status), Verb.PUT_IF)
    assert store.create("a", [b"x"]) is CreateOutcome.CREATED


# --- ranges that servers do not agree on ---------------------------------------------------------


def test_a_server_without_suffix_ranges_is_asked_by_size_and_remembered(
    store: ObjectStore, proxy: FaultProxy
) -> None:
    store.put("a", [b"0123456789"])
    store.put("empty", [])

    def refuse_suffix(facts: Facts) -> Fault | None:
        suffix = facts.headers.get("range", "").startswith("bytes=-")
        return Fault.refuse(416, "InvalidRange") if suffix else None

    proxy.plan = Deciding(refuse_suffix)
    assert store.get_tail("empty", 4) == (b"", 0)
    assert store.get_tail("a", 99) == (b"0123456789", 10)
    assert store.get_tail("a", 4) == (b"6789", 10)
    proxy.reset()
    assert store.get_tail("a", 4) == (b"6789", 10)
    assert verbs_of(proxy) == [Verb.HEAD, Verb.GET]
    with pytest.raises(ObjectNotFoundError):
        store.get_tail("gone", 4)
    gone = Fault.say(b"<Error><Code>NoSuchBucket</Code></Error>", 404)
    proxy.plan = first(9, gone)
    with pytest.raises(StoreUnreachableError, match="NoSuchBucket"):
        store.get_tail("a", 4)


def test_a_server_without_bulk_deletes_deletes_one_by_one(
    store: ObjectStore, proxy: FaultProxy
) -> None:
    store.put("a", [b"x"])
    store.put("b", [b"x"])
    proxy.plan = first(9, Fault.refuse(501, "NotImplemented"), Verb.DELETE_MANY)
    store.delete(["a", "b"])
    assert store.list("") == []


def test_a_server_without_conditional_writes_is_refused(
    store: ObjectStore, proxy: FaultProxy
) -> None:
    proxy.plan = first(9, Fault.refuse(501, "NotImplemented"), Verb.PUT_IF)
    with pytest.raises(StoreCapabilityError, match="NotImplemented"):
        probe(store, new_id=new_id)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "todo"),
    [
        (403, "AccessDenied", "s3:ListBucket"),
        (403, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"),
        (403, "RequestTimeTooSkewed", "clock"),
        (400, "AuthorizationHeaderMalformed", "region"),
        (403, "Unheard", "documentation"),
    ],
)
def test_a_refusal_is_named_with_a_way_out_and_is_never_an_absence(
    store: ObjectStore, proxy: FaultProxy, status: int, code: str, todo: str
) -> None:
    proxy.plan = first(9, Fault.refuse(status, code))
    for call in (
        lambda: store.get("a"),
        lambda: store.create("a", [b"x"]),
        lambda: store.list(""),
        lambda: store.delete(["a"]),
    ):
        with pytest.raises(StoreUnreachableError, match=code) as caught:
            call()
        assert todo in caught.value.todo
    assert len(proxy.requests()) <= 8  # no use in trying those again


@pytest.mark.parametrize("kind", ["ministack", "moto"])
def test_a_missing_bucket_is_not_a_missing_object(
    request: pytest.FixtureRequest, kind: str, tmp_path: Path
) -> None:
    s3: S3 = request.getfixturevalue(kind)
    store = open_store("s3://no-such-bucket/x", new_id=new_id, options=s3.options())
    (tmp_path / "file").write_bytes(b"x")
    for call in (
        lambda: store.get("a"),
        lambda: list(store.get_chunks("a")),
        lambda: store.get_tail("a", 1),
        lambda: store.put("a", [b"x"]),
        lambda: store.put_file("a", tmp_path / "file"),
        lambda: store.create("a", [b"x"]),
        lambda: store.list(""),
        lambda: store.delete(["a"]),
    ):
        with pytest.raises(StoreUnreachableError, match="NoSuchBucket") as caught:
            call()
        assert "Create the bucket" in caught.value.todo


def test_what_could_not_be_deleted_is_named(store: ObjectStore, proxy: FaultProxy) -> None:
    body = (
        b"<DeleteResult><Error><Key>x/b</Key><Code>AccessDenied</Code>"
        b"<Message>locked</Message></Error></DeleteResult>"
    )
    proxy.plan = first(9, Fault.say(body), Verb.DELETE_MANY)
    with pytest.raises(StoreUnreachableError, match="1 of 2 objects are left: x/b: AccessDenied"):
        store.delete(["a", "b"])


def test_what_may_pass_in_a_deletion_is_tried_again(store: ObjectStore, proxy: FaultProxy) -> None:
    store.put("a", [b"x"])
    body = b"<DeleteResult><Error><Key>x/a</Key><Code>InternalError</Code></Error></DeleteResult>"
    proxy.plan = first(2, Fault.say(body), Verb.DELETE_MANY)
    store.delete(["a"])
    assert store.list("") == []


def test_an_unknown_authority_is_said_and_not_tried_for_long(ministack: S3) -> None:
    with ministack.faulty() as proxy:
        store = through(ministack, proxy, ca_bundle="", deadline_s=60.0)
        before_s = time.monotonic()
        with pytest.raises(StoreUnreachableError, match="TLS") as caught:
            store.get("a")
        assert "ca_bundle" in caught.value.todo
        assert time.monotonic() - before_s < 20


# --- credentials ---------------------------------------------------------------------------------

SECRETS = ("not-so-secret", "topsecret", "second-secret")


def test_credentials_that_ran_out_are_taken_anew_from_the_chain(
    store: ObjectStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", [b"x"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "second")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "second-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "topsecret")

    def refuse_old(facts: Facts) -> Fault | None:
        old = "Credential=testing/" in facts.headers["authorization"]
        return Fault.expired_token() if old else None

    plan = proxy.plan = Deciding(refuse_old)
    assert store.get_tail("a", 1) == (b"x", 1)
    assert "x-amz-security-token" in plan.seen[-1].headers
    proxy.plan = first(9, error(400, "ExpiredToken", "The token topsecret has run out"))
    proxy.reset()
    with pytest.raises(StoreUnreachableError, match="ExpiredToken") as caught:
        store.get("a")
    assert len(proxy.requests()) == 2
    assert not [secret for secret in SECRETS if secret in str(caught.value) + repr(store)]


def test_no_credentials_at_all_is_said(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreUnreachableError, match="credentials") as caught:
        store.get("a")
    assert "every executor" in caught.value.todo


def test_a_missing_profile_is_said(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StoreUnreachableError, match="ProfileNotFound"):
        store.get("a")


def test_a_role_is_assumed_with_the_credentials_of_the_chain(
    moto: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", moto.plain_url)
    role = "arn:aws:iam::123456789012:role/state"
    with moto.faulty(tls=False) as proxy:
        plan = proxy.plan = Deciding()
        store = through(moto, proxy, role_arn=role)
        store.put("a", [b"x"])
        assert store.get("a") == b"x"
        assert len(plan.seen) == 2
        for request in plan.seen:
            assert "Credential=testing/" not in request.headers["authorization"]
            assert request.headers["x-amz-security-token"]


def test_no_secret_is_in_any_text(store: ObjectStore, proxy: FaultProxy) -> None:
    proxy.plan = first(9, error(403, "SignatureDoesNotMatch", "you said topsecret"))
    with pytest.raises(StoreUnreachableError) as caught:
        store.get("a")
    texts = [repr(store), str(caught.value), repr(caught.value), repr(store.capabilities)]
    assert not [secret for secret in SECRETS if secret in "".join(texts)]
    with pytest.raises(SettingError, match="open_store"):
        pickle.dumps(store)


# --- files in parts ------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def large_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """70 MiB: four parts of 16 MiB and one of 6."""
    path = tmp_path_factory.mktemp("large") / "file"
    block = os.urandom(1 << 20)
    with path.open("wb") as file:
        for number in range(70):
            file.write(number.to_bytes(4) + block[4:])
    yield path
    path.unlink()


def open_uploads(s3: S3, store: ObjectStore) -> list[Any]:
    found: list[Any] = s3.client().list_multipart_uploads(Bucket=s3.bucket).get("Uploads", [])
    place = store.uri.removeprefix(f"s3://{s3.bucket}/")
    return [upload for upload in found if upload["Key"].startswith(f"{place}/")]


@pytest.mark.parametrize(("kind", "threads"), [("moto", 1), ("ministack", 2)])
def test_a_large_file_goes_up_in_parts_and_comes_back_in_pieces(
    request: pytest.FixtureRequest, kind: str, threads: int, large_file: Path
) -> None:
    s3: S3 = request.getfixturevalue(kind)
    with s3.faulty() as proxy:
        store = through(s3, proxy, upload_threads=threads, deadline_s=60.0)
        store.put_file("base/file", large_file)
        puts = [each.in_bytes for each in proxy.requests() if each.verb is Verb.UPLOAD_PART]
        assert sorted(puts) == [6 << 20, *[16 << 20] * 4]
    with large_file.open("rb") as file:
        for chunk in store_of(s3, store).get_chunks("base/file", 5_000_001):
            assert chunk == file.read(5_000_001)
        assert file.read() == b""


def store_of(s3: S3, store: ObjectStore) -> ObjectStore:
    return open_store(store.uri, new_id=new_id, options=s3.options())


def test_a_large_file_takes_little_memory_in_both_directions(
    ministack: S3, large_file: Path
) -> None:
    store = open_store(ministack.fresh_uri(), new_id=new_id, options=ministack.options())
    store.list("")
    tracemalloc.start()
    try:
        store.put_file("base/file", large_file)
        assert sum(map(len, store.get_chunks("base/file", 1 << 20))) == 70 << 20
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16 << 20  # of 70


@pytest.mark.parametrize("kind", ["moto", "ministack"])
def test_an_upload_that_fails_is_aborted_and_shows_nothing(
    request: pytest.FixtureRequest, kind: str, large_file: Path
) -> None:
    s3: S3 = request.getfixturevalue(kind)
    with s3.faulty(tls=False) as proxy:
        store = through(s3, proxy)
        refused = Fault.refuse(403, "AccessDenied")
        proxy.plan = Script(Rule(fault=refused, verbs={Verb.UPLOAD_PART}, nth={3}))
        with pytest.raises(StoreUnreachableError, match="AccessDenied"):
            store.put_file("base/file", large_file)
        assert store.list("") == []
        assert open_uploads(s3, store) == []


@pytest.mark.parametrize(
    "fault",
    [
        Fault.say(b"<Error><Code>InternalError</Code><Message>x</Message></Error>"),
        Fault.say(b""),
        Fault.say(b"<html><body>the server is being repaired</body></html>"),
        Fault.lose_answer(),
        Fault.truncate(0.0),
        Fault.truncate(0.0, fixed_length=True),
        Fault.truncate(0.5, fixed_length=True),
    ],
)
def test_a_completion_that_went_wrong_or_was_not_answered_is_found_out(
    ministack: S3, fault: Fault, large_file: Path
) -> None:
    with ministack.faulty(tls=False) as proxy:
        store = through(ministack, proxy)
        proxy.plan = first(1, fault, Verb.UPLOAD_COMPLETE)
        store.put_file("base/file", large_file)
        assert proxy.count(Verb.UPLOAD_COMPLETE).requests == 2
        assert [info.size_bytes for info in store.list("")] == [70 << 20]


def test_a_file_that_shrinks_while_it_is_sent_is_not_the_store_s_failure(
    ministack: S3, proxy: FaultProxy, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1_000_000))
    store = through(ministack, proxy)
    store.list("")

    def shrink(facts: Facts) -> Fault | None:
        if facts.verb is not Verb.PUT:
            return None
        os.truncate(path, 10)
        return Fault.drop_before()

    proxy.plan = Deciding(shrink)
    with pytest.raises(LocalCopyError, match="shorter"):
        store.put_file("a", path)
    assert store.list("") == []


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
