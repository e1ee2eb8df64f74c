"""A broker that wants a password, over TLS."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pytest

from statebackend.continuous.sinks.kafka_sink import KafkaSink
from statebackend.continuous.sinks.sink import SinkContext, run_name
from statebackend.continuous.sources.kafka_source import KafkaSource
from statebackend.errors import ConnectorError
from tests.support.kafka import KafkaCluster, start_kafka
from tests.support.kafkaclient import KafkaClient

pytestmark = pytest.mark.kafka
JAAS = (
    "org.apache.kafka.common.security.plain.PlainLoginModule required "
    'user_job="hunter2" username="admin" password="admin";'
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[KafkaCluster, Path]]:
    folder = tmp_path_factory.mktemp("login")
    ca = _certificates(folder)
    name = "listener.name.login"
    options = {
        f"{name}.sasl.enabled.mechanisms": "PLAIN",
        f"{name}.plain.sasl.jaas.config": JAAS,
        f"{name}.ssl.keystore.type": "PEM",
        f"{name}.ssl.keystore.location": folder / "broker.pem",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",  # who does not log in: the tests, and the brokers
    }
    found = start_kafka(folder / "kafka", 1, options)
    yield found, ca
    found.stop()


def _certificates(folder: Path) -> Path:
    """Of the broker, in ``broker.pem``; the file that makes a client trust it."""
    import trustme
    from cryptography.hazmat.primitives import serialization as S

    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    key = S.load_pem_private_key(issued.private_key_pem.bytes(), None)
    pem = key.private_bytes(S.Encoding.PEM, S.PrivateFormat.PKCS8, S.NoEncryption())
    chain = b"".join(one.bytes() for one in issued.cert_chain_pems)
    (folder / "broker.pem").write_bytes(pem + chain)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    return folder / "ca.pem"


def right() -> Mapping[str, str]:
    return {"sasl.username": "job", "sasl.password": "hunter2"}


def wrong() -> Mapping[str, str]:
    return {"sasl.username": "job", "sasl.password": "swordfish"}


def allowed(client: KafkaClient, topic: str, markers: str) -> None:
    """Exactly what the page on Kafka says that a user must be allowed."""
    from confluent_kafka.admin import (
        AclBinding,
        AclOperation,
        AclPermissionType,
        ResourcePatternType,
        ResourceType,
    )

    wanted = [
        (ResourceType.TOPIC, topic, AclOperation.READ),
        (ResourceType.TOPIC, topic, AclOperation.WRITE),
        (ResourceType.TOPIC, markers, AclOperation.READ),
        (ResourceType.TOPIC, markers, AclOperation.WRITE),
        (ResourceType.TOPIC, markers, AclOperation.DESCRIBE_CONFIGS),
        (ResourceType.TRANSACTIONAL_ID, topic, AclOperation.WRITE),
    ]
    literal, allow = ResourcePatternType.LITERAL, AclPermissionType.ALLOW
    made = client.admin.create_acls(
        [
            AclBinding(kind, name, literal, "User:job", "*", operation, allow)
            for kind, name, operation in wanted
        ]
    )
    for one in made.values():
        one.result(30)


def test_a_password_lets_in_over_tls_and_a_wrong_one_is_said_and_not_shown(
    cluster: tuple[KafkaCluster, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka, ca = cluster
    client = KafkaClient(kafka.bootstrap)
    topic, markers = client.topic(), client.topic(cleanup_policy="compact")
    allowed(client, topic, markers)
    servers = kafka.brokers[0].login
    options = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "ssl.ca.location": str(ca),
    }
    sink = KafkaSink(
        topic,
        bootstrap_servers=servers,
        value="raw",
        transactional_id=topic,
        commits_topic=markers,
        options=options,
        secrets=right,
    )
    committer = sink.committer("job", topic)
    committer.commit([])
    writer = sink.open(SinkContext("job", topic, run_name(1, "r")))
    writer.write(pa.RecordBatch.from_pydict({"value": ["a"]}))
    committer.commit(writer.prepare(1))
    committer.close()

    source = KafkaSource(topic, bootstrap_servers=servers, options=options, secrets=right)
    (split,) = source.discover(None).splits
    reader = source.open(split, None)
    rows: list[bytes] = []
    for _ in range(2_000_000):
        batch = reader.read(10)
        rows += [] if batch is None else batch.column(0).to_pylist()
        if rows:
            break
    assert rows == [b"a"]
    reader.close()

    monkeypatch.setattr("statebackend.continuous.kafka.kafka_topics.CALL_S", 5.0)
    refused = KafkaSource(topic, bootstrap_servers=servers, options=options, secrets=wrong)
    with pytest.raises(ConnectorError, match="uthentication") as found:
        refused.discover(None)
    assert "swordfish" not in str(found.value)
