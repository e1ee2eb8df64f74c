"""S3 through a bad network: lost answers, bodies that break off, and what is tried again."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from recovery.drill import Facts, Fault, FaultProxy, Rule, Script, Verb
from snapshot.storage import CreateOutcome, ObjectStore, StoreOptions, open_store, probe
from snapshot.storage.counting_store import CountingStore
from snapshot.storage.s3.s3_client import TRIES
from statebackend.errors import StoreUnreachableError

if TYPE_CHECKING:
    from tests.support.s3 import S3
from tests.snapshot.faulty_s3 import *  # noqa: F403
from tests.snapshot.faulty_s3 import Deciding, first, through
from tests.snapshot.fresh_ids import new_id

pytestmark = pytest.mark.full  # an S3 server that fails in every way

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
    monkeypatch.setattr("snapshot.storage.store_probe.PROBE_DEADLINE_S", 3.0)
    # At once: between two tries the pauses are drawn, and one may lead past the deadline.
    monkeypatch.setattr("snapshot.storage.s3.s3_retry.LOG_AFTER_S", 0.0)
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
