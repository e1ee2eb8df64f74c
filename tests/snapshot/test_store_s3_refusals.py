"""S3 that refuses: what it cannot do, what it forbids, and credentials that are not good."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from recovery.drill import Facts, Fault, FaultProxy, Verb
from snapshot.storage import CreateOutcome, ObjectStore, open_store, probe
from snapshot.storage.store_options import StoreOptions
from statebackend.errors import (
    ObjectNotFoundError,
    SettingError,
    StoreCapabilityError,
    StoreUnreachableError,
)

if TYPE_CHECKING:
    from tests.support.s3 import S3
from tests.snapshot.faulty_s3 import *  # noqa: F403
from tests.snapshot.faulty_s3 import Deciding, first, through, verbs_of
from tests.snapshot.fresh_ids import new_id


def error(status: int, code: str, message: str) -> Fault:
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Fault.say(body.encode(), status)


# --- answers that say too little -----------------------------------------------------------------


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
    what = "Could not list the objects in s3://no-such-bucket/x: the bucket does not exist "
    with pytest.raises(StoreUnreachableError) as caught:
        store.list("")
    assert caught.value.what == f"{what}(NoSuchBucket, HTTP 404)."
    assert "s3_endpoint=" in caught.value.todo
    assert "--s3-endpoint" in caught.value.todo
    with pytest.raises(StoreUnreachableError, match="objects whose names begin with 'log/' in s3:"):
        store.list("log/")


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
        assert "s3_ca_bundle=" in caught.value.todo
        assert time.monotonic() - before_s < 20


def test_a_server_of_plain_http_is_told_to_need_http_and_is_not_tried_again(ministack: S3) -> None:
    url = ministack.plain_url.replace("http://", "https://")
    options = StoreOptions(endpoint_url=url, region="us-east-1", deadline_s=60.0)
    store = open_store("s3://bucket/x", new_id=new_id, options=options)
    before_s = time.monotonic()
    with pytest.raises(StoreUnreachableError, match="does not speak TLS at this port") as caught:
        store.get("a")
    assert "http://" in caught.value.todo
    assert "s3_endpoint=" in caught.value.todo
    assert time.monotonic() - before_s < 20


def test_an_endpoint_that_is_not_there_is_named_by_its_setting(
    aws_environment: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapshot.storage.s3.s3_retry.LOG_AFTER_S", 0.0)
    options = StoreOptions(endpoint_url="http://127.0.0.1:9", region="x", deadline_s=0.5)
    with pytest.raises(StoreUnreachableError, match="no whole answer") as caught:
        open_store("s3://bucket/x", new_id=new_id, options=options).list("")
    assert "s3_endpoint=" in caught.value.todo
    assert "--s3-endpoint" in caught.value.todo
    said = "no answer yet from http://127.0.0.1:9: could not list the objects in s3://bucket/x ("
    assert caplog.messages[0].startswith(said)
    assert "Amazon" not in caplog.text


def test_without_an_endpoint_the_log_says_to_give_one_if_the_store_is_not_amazons(
    aws_environment: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapshot.storage.s3.s3_retry.LOG_AFTER_S", 0.0)
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # no test asks Amazon
    store = open_store(
        "s3://bucket/x", new_id=new_id, options=StoreOptions(region="us-east-1", deadline_s=0.5)
    )
    with pytest.raises(StoreUnreachableError):
        store.get("a")
    assert "give its endpoint (s3_endpoint=, on the command line --s3-endpoint)" in caplog.text


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
