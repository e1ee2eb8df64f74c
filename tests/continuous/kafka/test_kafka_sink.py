"""A topic of Kafka as a sink, on a broker: at once, and by transactions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException

from statebackend.continuous.kafka.kafka_connection import KafkaConnection
from statebackend.continuous.kafka.kafka_producing import Mark, RecordProducer
from statebackend.continuous.sinks.kafka_commits import Commits, names_of
from statebackend.continuous.sinks.kafka_sink import KafkaSink
from statebackend.continuous.sinks.sink import SinkContext, SinkWriter, run_name
from statebackend.errors import ConnectorError, OutputLostError, SettingError
from tests.continuous.kafka.frozen_sink import JOB, UID
from tests.support.kafka import KafkaCluster, start_kafka
from tests.support.kafkaclient import KafkaClient

pytestmark = pytest.mark.kafka
ROOT = Path(__file__).parents[3]
FROZEN = "tests.continuous.kafka.frozen_sink"


def sink(client: KafkaClient, topic: str, **options: Any) -> KafkaSink:
    return KafkaSink(topic, bootstrap_servers=client.servers, **options)


def rows(*numbers: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": list(numbers)})


def seen(client: KafkaClient, topic: str, *, committed: bool = True) -> list[int]:
    return sorted(json.loads(v)["n"] for v in client.values(topic, committed=committed))


def prepared(
    found: KafkaSink, *numbers: int, run: str = "r", subtask: int = 0, parallelism: int = 1
) -> list[bytes]:
    """What a subtask's writer makes of rows."""
    name = run_name(1, run)
    writer = found.open(SinkContext(JOB, UID, name, subtask, parallelism))
    writer.write(rows(*numbers))
    made = writer.prepare(1)
    writer.close()
    return made


def delivered(writer: SinkWriter, batch: pa.RecordBatch) -> None:
    """All that a checkpoint of a sink that writes at once needs."""
    writer.write(batch)
    writer.prepare(1)
    writer.await_prepared(1)


def begun(found: KafkaSink, uid: str) -> Any:
    """A committer of a start that has nothing to commit."""
    committer = found.committer(JOB, uid)
    committer.commit([])
    return committer


# --- at once -------------------------------------------------------------------------------------


def test_rows_come_at_once_and_a_checkpoint_waits_for_them(client: KafkaClient) -> None:
    topic = client.topic(2)
    found = sink(client, topic, exactly_once=False, key="n")
    writer = found.open(SinkContext(JOB, UID, "r"))
    writer.write(rows(*range(30_000)))
    assert writer.prepare(1) == []
    writer.await_prepared(1)
    assert seen(client, topic) == list(range(30_000))
    assert {r.key() for r in client.records(topic)} == {str(n).encode() for n in range(30_000)}
    found.committer(JOB, UID).commit([])
    writer.close()
    writer.close()


def test_large_rows_wait_for_room_and_not_only_many(client: KafkaClient) -> None:
    topic = client.topic()
    options = {"queue.buffering.max.kbytes": 140 << 10, "compression.type": "lz4"}
    found = sink(client, topic, exactly_once=False, value="raw", options=options)
    writer = found.open(SinkContext(JOB, UID, "r"))
    writer.write(pa.RecordBatch.from_pydict({"value": ["x" * 50_000] * 3200}))
    writer.prepare(1)
    writer.await_prepared(1)
    writer.close()
    assert len(client.values(topic)) == 3200


def test_rows_that_the_cluster_does_not_take_are_an_error(client: KafkaClient) -> None:
    topic = client.topic(1, max_message_bytes=2000)
    for options, size in (({}, 10_000), ({"message.max.bytes": 2000}, 5_000)):
        found = sink(client, topic, exactly_once=False, value="raw", options=options)
        writer = found.open(SinkContext(JOB, UID, "r"))
        with pytest.raises(ConnectorError, match=topic):
            delivered(writer, pa.RecordBatch.from_pydict({"value": ["x" * size]}))
        writer.close()
    found = sink(client, "no-such-topic", exactly_once=False)
    writer = found.open(SinkContext(JOB, UID, "r"))
    with pytest.raises(ConnectorError, match="no-such-topic"):
        delivered(writer, rows(1))
    writer.close()


def test_a_checkpoint_waits_for_its_rows_and_the_rows_behind_it_do_not(
    kafka: KafkaCluster, client: KafkaClient
) -> None:
    topic = client.topic(2)
    writer = sink(client, topic, exactly_once=False, key="n").open(SinkContext(JOB, UID, "r"))
    with ThreadPoolExecutor(3) as beside:
        kafka.freeze(0)
        try:
            writer.write(rows(*range(1000)))
            writer.prepare(1)  # is aborted, so nobody waits for it
            writer.write(rows(*range(1000, 2000)))
            writer.prepare(2)
            acked = beside.submit(writer.await_prepared, 2)
            writer.write(rows(*range(2000, 3000)))
            writer.prepare(3)
            behind = [beside.submit(writer.await_prepared, 3) for _ in range(2)]
            time.sleep(0.5)
            assert not acked.done()
            assert not any(one.done() for one in behind)
        finally:
            kafka.thaw(0)
        acked.result(60)
        assert set(range(2000)) <= set(seen(client, topic))
        for one in behind:
            one.result(60)
        assert seen(client, topic) == list(range(3000))
    writer.close()


def test_a_writer_that_is_closed_confirms_nothing(kafka: KafkaCluster, client: KafkaClient) -> None:
    topic = client.topic()
    writer = sink(client, topic, exactly_once=False).open(SinkContext(JOB, UID, "r"))
    with ThreadPoolExecutor(1) as beside:
        kafka.freeze(0)
        try:
            writer.write(rows(1, 2, 3))
            writer.prepare(1)
            acked = beside.submit(writer.await_prepared, 1)
            time.sleep(0.2)
            writer.close()  # which makes the client report each of them as thrown away
            with pytest.raises(ConnectorError, match="ended before"):
                acked.result(30)
        finally:
            kafka.thaw(0)


def test_records_are_counted_as_well() -> None:
    """Should a client let go of what it has not reported, by then it still counts it."""
    producer = RecordProducer(KafkaConnection("127.0.0.1:1"), "Writing")
    record = pa.RecordBatch.from_pydict({"key": [b"k"], "value": [b"v"]})
    producer.send("t", record)
    mark = producer.mark()
    producer.send("t", record)
    let_go = Mark(lambda: None, mark.sent)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as beside:
        acked = beside.submit(producer.await_delivered, let_go)
        time.sleep(0.2)
        assert not acked.done()
        producer.close()
        with pytest.raises(ConnectorError, match="ended before"):
            acked.result(30)


@pytest.mark.parametrize("who", ["who sends", "who waits"])
def test_after_a_fatal_error_nobody_confirms_what_was_thrown_away(who: str) -> None:
    """The client says a fatal error once, to one thread, and throws all records away."""
    old_broker = {  # one that knows no idempotent producer, in the client's own process
        "test.mock.num.brokers": 1,
        "api.version.request": False,
        "broker.version.fallback": "0.9.0",
    }
    connection = KafkaConnection("127.0.0.1:1", old_broker)
    producer = RecordProducer(connection, "Writing")
    record = pa.RecordBatch.from_pydict({"key": [b"k"], "value": [b"v"]})
    producer.send("t", record)
    mark = producer.mark()

    def send_on() -> None:
        while True:
            producer.send("t", record)
            time.sleep(0.001)

    if who == "who sends":
        with pytest.raises(ConnectorError, match="Writing"):
            send_on()
    for _ in range(2):
        with pytest.raises(ConnectorError, match="Writing"):
            producer.await_delivered(mark)
    producer.close()


# --- by transactions -----------------------------------------------------------------------------


def test_rows_appear_when_their_checkpoint_is_committed_and_only_once(client: KafkaClient) -> None:
    topic = client.topic(2)
    found = sink(client, topic)
    committer = begun(found, topic)
    first = prepared(found, 1, 2)
    second = prepared(found, 3, subtask=1)
    assert seen(client, topic, committed=False) == []
    committer.commit(first)
    committer.commit([*first, *second])
    committer.commit(first)
    assert seen(client, topic) == [1, 2, 3]
    committer.close()
    for _ in range(2):  # restarts, which do not know how far the last one came
        again = found.committer(JOB, topic)
        again.commit([*first, *second])
        again.close()
    assert seen(client, topic, committed=False) == [1, 2, 3]


def test_a_large_checkpoint_is_committed_in_parts(client: KafkaClient) -> None:
    topic = client.topic()
    found = sink(client, topic, value="raw")
    committer = begun(found, topic)
    writer = found.open(SinkContext(JOB, topic, run_name(1, "r")))
    for _ in range(50):
        writer.write(pa.RecordBatch.from_pydict({"value": ["x" * 1000] * 1000}))
    made = writer.prepare(1)
    assert len(made) > 10
    committer.commit(made)
    committer.commit(made)
    assert len(client.values(topic)) == 50_000
    committer.close()


def test_what_was_written_at_a_higher_parallelism_is_committed_at_a_lower(
    client: KafkaClient,
) -> None:
    topic = client.topic()
    found = sink(client, topic)
    begun(found, topic).close()
    made = [prepared(found, n, subtask=n, parallelism=4)[0] for n in range(4)]
    half = begun(found, topic)
    half.commit(made[:2])  # the driver died after a part of them
    half.close()
    after = found.committer(JOB, topic)
    after.commit(made)
    after.commit([*made, *prepared(found, 7, run="s", subtask=1, parallelism=2)])
    assert seen(client, topic, committed=False) == [0, 1, 2, 3, 7]
    after.close()


def test_a_second_start_is_the_only_one_that_writes(client: KafkaClient) -> None:
    topic = client.topic()
    found = sink(client, topic)
    old = begun(found, topic)
    new = begun(found, topic)
    made = prepared(found, 1)
    with pytest.raises(ConnectorError, match="taken over"):
        old.commit(made)
    new.commit(made)
    assert seen(client, topic, committed=False) == [1]
    new.close()
    old.close()


def test_a_batch_is_committed_whole_and_once_though_it_comes_in_other_pieces(
    client: KafkaClient,
) -> None:
    topic = client.topic(2)
    found = sink(client, topic)
    first = found.batch_committer(topic, "")
    assert first.last_batch("app") == -1
    first.commit_batch("app", 3, [*prepared(found, 1, 2), *prepared(found, 3, subtask=1)])
    first.commit_batch("app", 3, prepared(found, 1, 2, 3))
    assert (first.last_batch("app"), first.last_batch("other")) == (3, -1)
    again = found.batch_committer(topic, "")
    assert again.last_batch("app") == 3
    again.commit_batch("app", 3, prepared(found, 3, 2, 1, run="later"))
    with pytest.raises(ConnectorError, match="taken over"):
        first.commit_batch("app", 4, prepared(found, 4))  # frozen since, and thawed
    again.commit_batch("app", 4, [])
    again.commit_batch("app", 4, prepared(found, 4))
    assert seen(client, topic, committed=False) == [1, 2, 3, 4]
    first.close()
    again.close()
    with pytest.raises(SettingError, match="exactly_once"):
        sink(client, topic, exactly_once=False).batch_committer(topic, "")


def test_a_transaction_that_took_too_long_is_not_told_as_taken_over(client: KafkaClient) -> None:
    topic = client.topic()
    old, new = (Commits(KafkaConnection(client.servers), topic, f"{topic}-c") for _ in range(2))
    for one in (old, new):
        one.open(begun=False)
    assert old._producer is not None
    fenced = KafkaException(KafkaError(KafkaError._FENCED))
    full = ConnectorError("no room", todo="Wait.")
    for error, took_s, said in (
        (fenced, 61.0, "took 61 s"),
        (fenced, 1.0, "taken over"),
        (full, 61.0, "no room"),
    ):
        with pytest.raises(ConnectorError, match=said):
            old._raise_failure(old._producer, error, took_s)
    with pytest.raises(ConnectorError, match="taken over"):
        old.write_batch("app", 1, [])
    new.close()


@pytest.mark.parametrize("where", ["before all", "before the transaction", "in the transaction"])
def test_an_old_start_that_was_frozen_and_thaws_writes_nothing_twice(
    client: KafkaClient, where: str
) -> None:
    topic = client.topic()
    found = sink(client, topic)
    begun(found, UID).close()
    made = prepared(found, 1, run=topic)
    _thawed(client, where, made[0], lambda: _commit(found, made))
    assert seen(client, topic) == [1]


def _commit(found: KafkaSink, made: list[bytes]) -> None:
    new = found.committer(JOB, UID)
    new.commit(made)
    new.close()


def _thawed(client: KafkaClient, where: str, piece: bytes, meanwhile: Any) -> str:
    """A process that stops itself while it commits; what it says in the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", FROZEN, client.servers, where, piece.hex()],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        until = time.monotonic() + 60
        while _state(process.pid) != "T":
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        meanwhile()
        process.send_signal(signal.SIGCONT)
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    # Before all it had nothing to be refused yet: it takes over itself, and sees what is committed.
    assert said.startswith("done" if where == "before all" else "refused"), said
    return said


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_transactional_id_can_be_named_anew(client: KafkaClient) -> None:
    topic = client.topic()
    found = sink(client, topic, transactional_id=f"{topic}-a", commits_topic=f"{topic}-c")
    old = begun(found, topic)
    made = prepared(found, 1)
    old.commit(made)
    other = sink(client, topic, transactional_id=f"{topic}-b", commits_topic=f"{topic}-c")
    new = other.committer(JOB, topic)
    new.commit(made)
    with pytest.raises(ConnectorError, match="taken over"):
        old.commit(prepared(found, 2, run="s"))
    assert seen(client, topic, committed=False) == [1]
    new.close()


def test_a_topic_of_markers_that_was_deleted_is_noticed(client: KafkaClient) -> None:
    topic = client.topic()
    found = sink(client, topic)
    committer = begun(found, topic)
    made = prepared(found, 1)
    committer.commit(made)
    committer.close()
    markers = names_of(JOB, topic, "", "")[1]
    client.delete(markers)
    for _ in range(2):  # also when it is there again, and empty
        again = found.committer(JOB, topic)
        with pytest.raises(OutputLostError, match=markers):
            again.commit(made)
    assert seen(client, topic) == [1]


def test_a_topic_of_markers_that_forgets_is_refused(client: KafkaClient) -> None:
    topic = client.topic()
    markers = client.topic(cleanup_policy="delete")
    with pytest.raises(SettingError, match="compact"):
        begun(sink(client, topic, commits_topic=markers), topic)


def test_a_topic_of_markers_may_have_more_partitions(client: KafkaClient) -> None:
    topic, markers = client.topic(), client.topic(8, cleanup_policy="compact")
    found = sink(client, topic, commits_topic=markers)
    begun(found, topic).close()
    made = [prepared(found, n, run=f"r{n}")[0] for n in range(4)]
    for _ in range(2):
        again = found.committer(JOB, topic)
        again.commit(made)
        again.close()
    assert seen(client, topic) == [0, 1, 2, 3]


def test_output_prepared_for_transactions_is_committed_by_a_sink_without(
    client: KafkaClient,
) -> None:
    topic = client.topic()
    begun(sink(client, topic), topic).close()
    made = prepared(sink(client, topic), 1)
    changed = sink(client, topic, exactly_once=False).committer(JOB, topic)
    changed.commit(made)
    changed.commit(made)
    assert seen(client, topic) == [1]
    changed.close()


def test_nothing_is_twice_when_the_broker_has_forgotten_ids_and_offsets(tmp_path: Path) -> None:
    """Stopped for longer than the cluster keeps transactional ids, producers' ids and offsets."""
    forgetful = {
        "transactional.id.expiration.ms": 5000,
        "transaction.remove.expired.transaction.cleanup.interval.ms": 200,
        "producer.id.expiration.ms": 5000,
        "producer.id.expiration.check.interval.ms": 200,
        "offsets.retention.minutes": 1,
        "offsets.retention.check.interval.ms": 500,
        "log.cleaner.backoff.ms": 200,
    }
    kafka = start_kafka(tmp_path, 1, forgetful)
    try:
        client = KafkaClient(kafka.bootstrap)
        topic = client.topic()
        found = sink(client, topic)
        one, two = prepared(found, 1, run="a"), prepared(found, 2, run="b")
        persistently(found, [])
        persistently(found, one)

        def forgotten() -> None:
            time.sleep(6)
            persistently(found, one)
            persistently(found, [*one, *two])
            time.sleep(6)

        # What thaws has an id that the cluster does not know any more.
        _thawed(client, "before the transaction", two[0], forgotten)
        assert seen(client, topic) == [1, 2]
        persistently(found, [*one, *two])
        assert seen(client, topic, committed=False) == [1, 2]
    finally:
        kafka.stop()


def persistently(found: KafkaSink, pieces: list[bytes]) -> None:
    """Commit, and begin again where that fails, as a job does."""
    for tries_left in reversed(range(20)):
        committer = found.committer(JOB, UID)
        try:
            committer.commit(pieces)
        except ConnectorError:
            if not tries_left:
                raise
        else:
            return
        finally:
            committer.close()
