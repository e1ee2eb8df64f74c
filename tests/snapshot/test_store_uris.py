"""A store is opened by its URI and its options, and a wrong one is refused with the reason."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from snapshot.storage import StoreOptions, open_store
from statebackend.errors import EnvironmentMissingError, SettingError
from tests.snapshot.fresh_ids import new_id


@pytest.mark.parametrize("form", ["{path}", "file://{quoted}", "file:{quoted}"])
def test_a_local_place_opens_by_path_or_uri(tmp_path: Path, form: str) -> None:
    path = tmp_path / "a b%20c"
    quoted = path.as_uri().removeprefix("file://")
    store = open_store(form.format(path=path, quoted=quoted), new_id=new_id)
    store.put("x", [b"1"])
    assert (path / "x").read_bytes() == b"1"
    assert open_store(store.uri, new_id=new_id).get("x") == b"1"


def test_one_memory_store_per_name_in_a_process() -> None:
    name = new_id()
    open_store(f"memory://{name}", new_id=new_id).put("x", [b"1"])
    assert open_store(f"memory://{name}", new_id=new_id).get("x") == b"1"
    assert open_store(f"memory://{new_id()}", new_id=new_id).list("") == []


@pytest.mark.parametrize(
    ("uri", "named"),
    [
        ("nosuch://host/x", "file, memory, s3"),
        ("simplecache::file:///x", "chain"),
        ("here/there", "relative"),
        ("./a:b", "relative"),
        ("", "relative"),
        ("file://host/x", "absolute"),
        ("file:x", "absolute"),
        ("memory:", "name"),
        ("memory://", "name"),
    ],
)
def test_a_uri_that_cannot_be_opened_says_why(uri: str, named: str) -> None:
    with pytest.raises(SettingError, match=named):
        open_store(uri, new_id=new_id)


def test_a_uri_without_a_scheme_may_have_been_meant_for_s3() -> None:
    with pytest.raises(SettingError) as caught:
        open_store("bucket/state", new_id=new_id)
    assert "s3://bucket/path" in caught.value.todo


@pytest.mark.parametrize(
    "uri",
    [
        "s3://key:topsecret@bucket/x",
        "s3://key@bucket/topsecret",
        "sftp://user:topsecret@host/x",
        "file://user:topsecret@host/x",
    ],
)
def test_credentials_in_a_uri_are_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(SettingError) as caught:
        open_store(uri, new_id=new_id)
    assert "topsecret" not in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        *("s3://", "s3:bucket", "s3://B/x", "s3://a/x", "s3://a..b/x", "s3://1.2.3.4/x"),
        *("s3://bucket//x", "s3://bucket/../x", "s3://bucket/.x", "s3://buc_ket/x"),
    ],
)
def test_a_malformed_s3_uri_is_refused(uri: str) -> None:
    with pytest.raises(SettingError):
        open_store(uri, new_id=new_id)


def test_what_only_s3_can_give_is_not_left_out_in_silence(tmp_path: Path) -> None:
    options = StoreOptions(sse="AES256", endpoint_url="https://host")
    for uri in (str(tmp_path), tmp_path.as_uri(), "memory://x", "gs://bucket/x"):
        with pytest.raises(SettingError, match="endpoint_url, sse"):
            open_store(uri, new_id=new_id, options=options)
    open_store("memory://x", new_id=new_id, options=StoreOptions(deadline_s=5))


@pytest.mark.parametrize(
    "given",
    [
        {"endpoint_url": "host:80"},
        {"endpoint_url": "https://"},
        {"endpoint_url": "https://host?x=1"},
        {"sse": "ROT13"},
        {"kms_key_id": "key"},
        {"deadline_s": 0},
        {"read_timeout_s": float("nan")},
        {"max_connections": 0},
    ],
)
def test_options_that_mean_nothing_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        StoreOptions(**given)


def test_options_travel_and_refuse_a_secret_without_repeating_it() -> None:
    options = StoreOptions(endpoint_url="https://host:9000", region="here", deadline_s=1.5)
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(SettingError) as caught:
        StoreOptions(endpoint_url="https://key:topsecret@host")
    assert "topsecret" not in str(caught.value)


def test_without_boto3_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("snapshot.storage.s3")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "botocore", None)
    with pytest.raises(EnvironmentMissingError) as caught:
        open_store("s3://bucket/x", new_id=new_id)
    assert ".[s3]" in caught.value.todo
