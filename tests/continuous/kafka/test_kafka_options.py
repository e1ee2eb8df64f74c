"""What the source and the sink of Kafka refuse, and what they never show. Without a broker."""

from __future__ import annotations

import functools
import pickle
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark import cloudpickle

from statebackend.continuous.kafka.kafka_connection import KafkaConnection
from statebackend.continuous.kafka.kafka_markers import Marks
from statebackend.continuous.sinks.kafka_commits import names_of
from statebackend.continuous.sinks.kafka_sink import KafkaSink
from statebackend.continuous.sources.kafka_source import KafkaSource
from statebackend.continuous.sources.source import Discovery
from statebackend.errors import (
    ConnectorError,
    CorruptionError,
    SchemaError,
    SettingError,
    UnsupportedFormatError,
)
from tests.support.servers import free_port

SECRET = "hunter" + "2"


def login() -> Mapping[str, str]:
    return {"sasl.password": "hunter" + "2"}


def source(**options: Any) -> KafkaSource:
    given = {"topics": "in", "bootstrap_servers": "host:1", **options}
    return KafkaSource(given.pop("topics"), **given)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"topics": []}, SettingError),
        ({"topics": ""}, SettingError),
        ({"topics": ["a", "a"]}, SettingError),
        ({"bootstrap_servers": " "}, SettingError),
        ({"start": "now"}, SettingError),
        ({"start": datetime(2026, 1, 1)}, SettingError),
        ({"start": "committed"}, SettingError),
        ({"include": ["nothing"]}, SettingError),
        ({"include": "key"}, SettingError),
        ({"include": ["key", "key"]}, SettingError),
        ({"include": ["key"], "value": "json: key string"}, SettingError),
        ({"event_time": "value"}, SchemaError),
        ({"options": {"group.id": "x"}}, SettingError),
        ({"options": {"isolation.level": "read_uncommitted"}}, SettingError),
        ({"options": {"sasl.password": SECRET}}, SettingError),
        ({"options": {"ssl.key.pem": SECRET}}, SettingError),
        ({"options": {"sasl.oauthbearer.assertion.private.key.passphrase": SECRET}}, SettingError),
        ({"options": {"sasl.oauthbearer.client.secret": SECRET}}, SettingError),
        ({"secrets": {"sasl.password": SECRET}}, SettingError),
        ({"secrets": lambda held=SECRET: {"sasl.password": held}}, SettingError),
        ({"secrets": functools.partial(dict, password=SECRET)}, SettingError),
    ],
)
def test_a_wrong_use_is_refused_where_it_is_made(
    options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error) as found:
        source(**options)
    assert SECRET not in str(found.value)


def test_a_function_that_carries_a_secret_along_is_refused() -> None:
    held = SECRET
    with pytest.raises(SettingError) as found:
        KafkaSink("out", bootstrap_servers="host:1", secrets=lambda: {"sasl.password": held})
    assert SECRET not in str(found.value)


class Login:
    """Holds a password; is called for it."""

    def __init__(self, password: str) -> None:
        self.password = password

    def __call__(self) -> Mapping[str, str]:
        return {"sasl.password": self.password}

    def named(self) -> Mapping[str, str]:
        return self()


def as_in_a_script(text: str) -> Any:
    """``login`` of a program's main module, which is sent by its content."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(text, names)
    return names["login"]


@pytest.mark.parametrize(
    "secrets",
    [
        Login(SECRET),
        Login(SECRET).named,
        as_in_a_script(f"P = {SECRET!r}\ndef login(): return {{'sasl.password': P}}"),
        as_in_a_script(
            f"D = [{{'p': {SECRET!r}}}]\ndef login(): return {{'sasl.password': D[0]['p']}}"
        ),
        as_in_a_script(f"def login(): return {{'sasl.password': {SECRET!r}}}"),
    ],
)
def test_a_secret_that_would_be_sent_some_other_way_is_refused(secrets: Any) -> None:
    with pytest.raises(SettingError) as found:
        source(secrets=secrets)
    assert SECRET not in str(found.value)


def test_a_function_of_a_script_that_reads_its_secrets_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "import os\nNAME = 'PASSWORD'\ndef login(): return {'sasl.password': os.environ[NAME]}"
    source(secrets=as_in_a_script(text))  # it cannot be read here
    monkeypatch.setenv("PASSWORD", "password")
    source(secrets=as_in_a_script(text))


def test_no_secret_is_shipped_or_shown() -> None:
    options = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN"}
    made = [
        source(options=options, secrets=login, start=datetime(2026, 1, 1, tzinfo=UTC)),
        source(topics=re.compile("in-.*"), secrets=login),
        KafkaSink("out", bootstrap_servers="host:1", options=options, secrets=login),
    ]
    for one in made:
        assert SECRET.encode() not in cloudpickle.dumps(one)
        assert SECRET not in repr(one) + repr(vars(pickle.loads(pickle.dumps(one))))


def test_an_error_of_librdkafka_shows_no_secret() -> None:
    connection = KafkaConnection("host:1", {}, login)
    assert connection.shown(ValueError(f"the password {SECRET} is wrong.")) == (
        "the password *** is wrong"
    )
    assert connection.settings(group_id="x")["group.id"] == "x"


def test_an_option_that_there_is_not_is_said() -> None:
    pytest.importorskip("confluent_kafka", reason="the extra kafka is not installed")
    with pytest.raises(SettingError, match=r"no\.such\.thing"):
        source(options={"no.such.thing": 1}).discover(None)


def test_a_cluster_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("confluent_kafka", reason="the extra kafka is not installed")
    monkeypatch.setattr("statebackend.continuous.kafka.kafka_topics.CALL_S", 1.0)
    servers = f"127.0.0.1:{free_port()}"
    away = source(bootstrap_servers=servers, secrets=login)
    with pytest.raises(ConnectorError, match=servers) as found:
        away.discover(None)
    assert SECRET not in str(found.value)
    state = {"topics": {"in": {"id": "x", "partitions": 1}}}
    assert away.discover(state) == Discovery((), state, done=False)  # a job that runs waits


# --- what a sink notes ---------------------------------------------------------------------------


def test_a_piece_is_committed_once_a_later_one_of_its_subtask_is() -> None:
    marks = Marks().after([("r1", 0, 4), ("r1", 1, 0), ("r1", 0, 2)])
    assert [marks.has("r1", 0, n) for n in (0, 4, 5)] == [True, True, False]
    assert (marks.has("r1", 1, 0), marks.has("r1", 1, 1)) == (True, False)
    assert not marks.has("r2", 0, 0)


def test_marks_read_as_they_were_written() -> None:
    marks = Marks("id").after([("r1", 0, 4), ("r1", 10, 7), ("r2", 0, 1)])
    found = Marks()
    for record in (Marks("older").begun_record(), marks.begun_record()):
        found.take(*record.to_pylist()[0].values())
    for run in ("r1", "r2"):
        found.take(*marks.record(run).to_pylist()[0].values())
    assert found.id == "id"
    assert [found.has(*one) for one in (("r1", 10, 7), ("r1", 10, 8), ("r2", 0, 1))] == [
        *(True, False, True)
    ]


def test_a_foreign_record_among_the_marks_is_refused() -> None:
    for key, value in ((b"sink", b"{}"), (b"r1", b"x"), (b"r1", b'{"v":1,"last":{"x":1}}')):
        with pytest.raises(CorruptionError):
            Marks().take(key, value)
    with pytest.raises(UnsupportedFormatError):
        Marks().take(b"r1", b'{"v":2,"last":{"0":1}}')


def test_sinks_have_names_of_their_own_that_kafka_takes() -> None:
    names = {names_of(job, uid, "", "") for job in ("a b/ü", "a-b-ü") for uid in ("x", "y")}
    assert len(names) == 4
    assert all(re.fullmatch(r"[\w.-]{1,200}", topic, re.ASCII) for _, topic in names)
    assert names_of("a", "x", "mine", "") == ("mine", "mine-commits")
    assert names_of("a", "x", "mine", "marks") == ("mine", "marks")
