"""The store suite and the commit log on a gateway of Ceph's, the strictest server run here."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest

from snapshot.storage import ObjectStore, open_store, probe
from snapshot.storage.testing import StoreTests
from statebackend.errors import StoreUnreachableError
from tests.snapshot import test_commit_log, test_commit_log_answers
from tests.snapshot.fresh_ids import new_id

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.s3 import S3

pytestmark = pytest.mark.ceph


@pytest.fixture
def store(ceph: S3) -> ObjectStore:
    return open_store(ceph.fresh_uri(), new_id=new_id, options=ceph.options())


class TestCeph(StoreTests):
    @pytest.fixture
    def store(self, ceph: S3) -> ObjectStore:
        return open_store(ceph.fresh_uri(), new_id=new_id, options=ceph.options())


class TestCephOverTls(StoreTests):
    @pytest.fixture
    def store(self, ceph: S3) -> ObjectStore:
        return open_store(ceph.fresh_uri(), new_id=new_id, options=ceph.options(tls=True))


# Every test of the log that runs on any store runs on the fixture above, too.
globals().update(
    {
        name: test
        for log_tests in (test_commit_log, test_commit_log_answers)
        for name, test in vars(log_tests).items()
        if name.startswith("test_") and "store" in inspect.signature(test).parameters
    }
)


def test_the_gateway_passes_the_probe(store: ObjectStore) -> None:
    probe(store, new_id=new_id)


def test_a_wrong_secret_is_said(ceph: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "topsecret")
    store = open_store(ceph.fresh_uri(), new_id=new_id, options=ceph.options())
    with pytest.raises(StoreUnreachableError, match="SignatureDoesNotMatch") as caught:
        store.get("a")
    assert "AWS_SECRET_ACCESS_KEY" in caught.value.todo
    assert "topsecret" not in str(caught.value)


def test_a_missing_bucket_is_not_a_missing_object(ceph: S3) -> None:
    store = open_store("s3://no-such-bucket/x", new_id=new_id, options=ceph.options())
    with pytest.raises(StoreUnreachableError, match="NoSuchBucket"):
        store.get("a")


def test_a_large_file_goes_up_in_parts(ceph: S3, store: ObjectStore, tmp_path: Path) -> None:
    block = bytes(range(256)) * 4096
    (tmp_path / "file").write_bytes(block * 70)
    store.put_file("base/file", tmp_path / "file")
    assert all(chunk == block for chunk in store.get_chunks("base/file", len(block)))
    assert [info.size_bytes for info in store.list("")] == [len(block) * 70]
