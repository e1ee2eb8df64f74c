"""Redis streams as a source: the one real log that the sources' contract is held to."""

from __future__ import annotations

import json
import pickle
import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from statebackend.continuous.sources.redis_source import RedisStreamSource
from statebackend.continuous.sources.source import Json, SplitReader
from statebackend.errors import (
    ConnectorError,
    DamagedInputError,
    NotReplayableError,
    SchemaError,
    SettingError,
    UnsupportedTypeError,
)
from tests.support.redisserver import RedisServer, start_redis
from tests.support.servers import free_port

SCHEMA = "n BIGINT"


def get_password() -> str:
    return "hunter2"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"url": "http://host"}, SettingError),
        ({"url": "redis://me:hunter2@host"}, SettingError),
        ({"url": "redis://host?password=hunter2"}, SettingError),
        ({"streams": []}, SettingError),
        ({"streams": ["a", "a"]}, SettingError),
        ({"start": "now"}, SettingError),
        ({"schema": "a ARRAY<INT>"}, UnsupportedTypeError),
        ({"event_time": "n"}, SchemaError),
    ],
)
def test_a_wrong_use_is_refused_where_it_is_made(
    options: dict[str, Any], error: type[Exception]
) -> None:
    given_options = {"url": "redis://host:1", "streams": ["a"], "schema": SCHEMA, **options}
    url, streams = given_options.pop("url"), given_options.pop("streams")
    with pytest.raises(error) as found:
        RedisStreamSource(url, streams, **given_options)
    assert "hunter2" not in str(found.value)


def test_a_server_that_is_not_there_is_named_without_secrets() -> None:
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    source = RedisStreamSource(url, ["a"], schema=SCHEMA, password=get_password)
    with pytest.raises(ConnectorError, match=f"127.0.0.1:{port}") as found:
        source.discover(None)
    assert "hunter2" not in str(found.value) + repr(source)


# --- on a server ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    found = start_redis(tmp_path_factory.mktemp("redis"))
    yield found
    found.stop()


@pytest.fixture(scope="module")
def client(server: RedisServer) -> Iterator[Any]:
    redis = pytest.importorskip("redis", reason="the extra redis is not installed")
    found = redis.Redis.from_url(server.url)
    yield found
    found.close()


@pytest.fixture
def key() -> str:
    return uuid.uuid4().hex


def source_of(server: RedisServer, *keys: str, **options: Any) -> RedisStreamSource:
    return RedisStreamSource(server.url, keys, **{"schema": SCHEMA, **options})


def opened(source: RedisStreamSource, position: Json | None = None) -> SplitReader:
    (split,) = source.discover(None).splits
    return source.open(split, position)


def taken(reader: SplitReader, max_rows: int = 1_000) -> list[Any]:
    batch = reader.read(max_rows)
    return [] if batch is None else batch.column(0).to_pylist()


def add(client: Any, key: str, *values: int) -> None:
    for value in values:
        client.xadd(key, {"n": value})


@pytest.mark.redis
def test_entries_come_in_order_as_they_are_added(
    server: RedisServer, client: Any, key: str
) -> None:
    source = source_of(server, key)
    assert (source.bounded, source.splits_end) == (False, False)
    reader = opened(source)
    assert taken(reader) == []
    add(client, key, 1, 2, 3)
    assert taken(reader, 2) == [1, 2]
    assert taken(reader, 2) == [3]
    assert taken(reader) == []
    assert not reader.ended
    reader.close()
    reader.close()


@pytest.mark.redis
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5), st.booleans()), max_size=12))
def test_from_any_position_the_rest_is_the_same(
    server: RedisServer, client: Any, steps: list[tuple[int, int, bool]]
) -> None:
    key = uuid.uuid4().hex
    source = source_of(server, key)
    (split,) = pickle.loads(pickle.dumps(source)).discover(None).splits
    position: Json | None = None
    added, got = 0, []
    for more, max_rows, trim in [*steps, (0, 1_000, False)]:
        add(client, key, *range(added, added + more))
        added += more
        reader = source.open(split, position)
        got += taken(reader, max_rows)
        position = json.loads(json.dumps(reader.position))
        reader.close()
        if trim and got:
            client.xtrim(key, maxlen=added - len(got), approximate=False)
    assert got == list(range(added))


@pytest.mark.redis
def test_a_bounded_source_ends_where_the_stream_did(
    server: RedisServer, client: Any, key: str
) -> None:
    add(client, key, 1, 2)
    source = source_of(server, key, bounded=True)
    found = source.discover(None)
    add(client, key, 3)
    reader = source.open(found.splits[0], None)
    assert taken(reader) == [1, 2]
    assert reader.ended
    assert taken(reader) == []
    reader.close()
    reader = opened(source_of(server, key + "none", bounded=True))
    assert reader.ended
    reader.close()


@pytest.mark.redis
def test_latest_begins_with_what_comes_then(server: RedisServer, client: Any, key: str) -> None:
    add(client, key, 1, 2)
    source = source_of(server, key, start="latest")
    (split,) = source.discover(None).splits
    add(client, key, 3)
    for _ in range(2):  # also after a restart without a checkpoint
        reader = source.open(split, None)
        assert taken(reader) == [3]
        reader.close()


@pytest.mark.redis
def test_what_was_gone_before_the_job_began_is_no_loss(
    server: RedisServer, client: Any, key: str
) -> None:
    add(client, key, 1, 2, 3, 4)
    client.xtrim(key, maxlen=3, approximate=False)
    client.xdel(key, client.xrange(key)[1][0])
    reader = opened(source_of(server, key))
    assert taken(reader) == [2, 4]
    reader.close()


@pytest.mark.redis
@pytest.mark.parametrize("how", ["trim", "delete one", "delete all", "begin anew"])
@pytest.mark.parametrize("when", ["at a restart", "while reading"])
def test_entries_that_are_gone_unread_are_noticed(
    server: RedisServer, client: Any, key: str, how: str, when: str
) -> None:
    source = source_of(server, key)
    (split,) = source.discover(None).splits
    add(client, key, 1, 2, 3, 4)
    reader = source.open(split, None)
    assert taken(reader, 1) == [1]
    if how == "trim":
        client.xtrim(key, maxlen=2, approximate=False)
    elif how == "delete one":
        client.xdel(key, client.xrange(key)[2][0])
    else:
        client.delete(key)
        if how == "begin anew":
            client.xadd(key, {"n": 9}, id="1-1")
    position = reader.position
    go_on = reader.read if when == "while reading" else lambda _: source.open(split, position)
    with pytest.raises(NotReplayableError, match=key):
        go_on(10)
    reader.close()


@pytest.mark.redis
def test_fields_become_columns_of_their_types(server: RedisServer, client: Any, key: str) -> None:
    schema = (
        "b BOOLEAN, i INT, d DOUBLE, m DECIMAL(10,2), s STRING, day DATE, at TIMESTAMP, "
        "local TIMESTAMP_NTZ"
    )
    client.xadd(
        key,
        {
            **{"b": "true", "i": "-5", "d": "1e3", "m": "1.25", "s": "ü,", "other": "x"},
            **{"day": "2020-01-02", "at": "2020-01-02T03:04:05.5Z", "local": "2020-01-02 03:04:05"},
        },
    )
    client.xadd(key, {"other": ""})
    reader = opened(source_of(server, key, schema=schema, event_time="at"))
    batch = reader.read(10)
    assert batch is not None
    at = datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC)
    full, empty = (list(row.values()) for row in batch.to_pylist())
    assert full == [
        *(True, -5, 1000.0, Decimal("1.25"), "ü,", date(2020, 1, 2)),
        *(at.replace(microsecond=500_000), at.replace(tzinfo=None)),
    ]
    assert empty == [None] * 8
    reader.close()


@pytest.mark.redis
@pytest.mark.parametrize(
    ("schema", "value"), [("n INT", "x"), ("n INT", "1.5"), ("s STRING", b"\xff")]
)
def test_an_entry_that_does_not_fit_is_named(
    server: RedisServer, client: Any, key: str, schema: str, value: Any
) -> None:
    id = client.xadd(key, {"n": value, "s": value}).decode()
    reader = opened(source_of(server, key, schema=schema))
    with pytest.raises(DamagedInputError, match=f"{id} of the stream '{key}'"):
        reader.read(10)
    reader.close()


@pytest.mark.redis
def test_a_field_that_must_be_there_is_missed(server: RedisServer, client: Any, key: str) -> None:
    client.xadd(key, {"m": 1})
    reader = opened(source_of(server, key, schema="n INT NOT NULL"))
    with pytest.raises(DamagedInputError, match="missing"):
        reader.read(10)
    reader.close()


@pytest.mark.redis
def test_a_key_that_is_no_stream_is_said(server: RedisServer, client: Any, key: str) -> None:
    client.set(key, "x")
    with pytest.raises(ConnectorError, match=key):
        source_of(server, key).discover(None)


@pytest.mark.redis
def test_several_streams_are_several_splits(server: RedisServer, client: Any, key: str) -> None:
    source = source_of(server, key, f"{key}2")
    found = source.discover(None)
    assert [split.id for split in found.splits] == [key, f"{key}2"]
    assert found.done
    assert source.discover(found.state).splits == ()


@pytest.mark.redis
def test_a_server_that_dies_is_an_error_without_secrets(
    tmp_path_factory: pytest.TempPathFactory, key: str
) -> None:
    redis = pytest.importorskip("redis", reason="the extra redis is not installed")
    server = start_redis(tmp_path_factory.mktemp("redis"), "--requirepass", "hunter2")
    try:
        source = RedisStreamSource(server.url, [key], schema=SCHEMA, password=get_password)
        with redis.Redis.from_url(server.url, password="hunter2") as client:
            add(client, key, 1)
        reader = opened(source)
        assert taken(reader) == [1]
    finally:
        server.stop()
    with pytest.raises(ConnectorError) as found:
        reader.read(1)
    assert "hunter2" not in str(found.value)
    reader.close()
