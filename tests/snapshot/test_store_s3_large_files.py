"""Large files on S3: they go up in parts, come back in pieces, and leave nothing when it fails."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from recovery.drill import Facts, Fault, FaultProxy, Rule, Script, Verb
from snapshot.storage import ObjectStore, open_store
from statebackend.errors import LocalCopyError, StoreUnreachableError

if TYPE_CHECKING:
    from tests.support.s3 import S3
from tests.snapshot.faulty_s3 import *  # noqa: F403
from tests.snapshot.faulty_s3 import Deciding, first, through
from tests.snapshot.fresh_ids import new_id

pytestmark = pytest.mark.full  # large files on an S3 server

# --- files in parts ------------------------------------------------------------------------------


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
