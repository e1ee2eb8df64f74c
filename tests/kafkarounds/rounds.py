"""The rounds: what feeds, what strikes, and what compares."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from recovery.drill.cluster.guard_process import guarded
from recovery.drill.cluster.local_cluster import TWO_HOSTS, open_cluster
from tests.kafkarounds.kafkajob import Given
from tests.kafkarounds.lake_reader import LakeReader, Row
from tests.support.kafka import KafkaCluster, connector_jars, start_kafka

__all__ = ["KINDS", "Feeder", "Reader", "Rounds", "truth"]

KINDS: Final = ("worker", "executor", "driver", "broker")
EXACTLY_ONCE: Final = ("exactly-once", "delta", "iceberg")
KEYS: Final = 37
ROUND_LIMIT_S: Final = 420.0
_ROOT: Final = Path(__file__).parents[2]


def truth(rows: int) -> set[Row]:
    """What must come out of so many rows."""
    n: Counter[int] = Counter()
    total: Counter[int] = Counter()
    found = set()
    for value in range(rows):
        key = value * 7 % KEYS
        n[key] += 1
        total[key] += value
        found.add((key, value, n[key], total[key]))
    return found


class Feeder(threading.Thread):
    """Sends rows, a few hundred a second, through whatever happens to brokers.

    Attributes:
        acked: rows that the cluster has, from the first on.
    """

    def __init__(self, servers: str, topic: str, pause_s: float = 0.05) -> None:
        super().__init__(daemon=True)
        self._topic, self._pause_s = topic, pause_s
        self._producer = Producer(
            {"bootstrap.servers": servers, "enable.idempotence": True, "log_level": 2}
        )
        self._over = threading.Event()
        self._given = 0
        self.acked = 0
        self.error: Any = None

    def run(self) -> None:
        while not self._over.is_set() and self.error is None:
            for _ in range(10):
                value = self._given
                key = value * 7 % KEYS
                row = msgspec.json.encode({"key": key, "value": value})
                self._producer.produce(self._topic, row, str(key), on_delivery=self._sent)
                self._given += 1
            self._producer.poll(0)
            self._over.wait(self._pause_s)
        self._producer.flush(120)

    def _sent(self, error: Any, message: Any) -> None:
        self.error = self.error or error
        self.acked += error is None

    def end(self) -> int:
        """Send no more; how many rows there are."""
        self._over.set()
        self.join(150)
        assert self.error is None, self.error
        assert self.acked == self._given
        return self.acked


class Reader(threading.Thread):
    """Reads what was committed, from outside.

    Attributes:
        rows: each with how often it came.
    """

    def __init__(self, servers: str, topic: str, partitions: int) -> None:
        super().__init__(daemon=True)
        self._consumer = Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": "reader",
                "isolation.level": "read_committed",
                "auto.offset.reset": "error",
                "enable.auto.commit": False,
                "log_level": 2,
            }
        )
        self._consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
        self._over = threading.Event()
        self.rows: Counter[Row] = Counter()
        self.error: Any = None

    def run(self) -> None:
        while not self._over.is_set():
            for record in self._consumer.consume(1000, timeout=0.2):
                if record.error() is not None:
                    if not record.error().retriable():
                        self.error = record.error()
                    continue
                row = msgspec.json.decode(record.value() or b"")
                self.rows[row["key"], row["value"], row["n"], row["total"]] += 1

    def has(self, rows: int) -> bool:
        """Whether the first so many rows of the input have come out."""
        assert self.error is None, self.error
        seen = {row[1] for row in self.rows.copy()}
        return all(value in seen for value in range(rows))

    def end(self) -> Counter[Row]:
        """Read no more."""
        self._over.set()
        self.join(30)
        self._consumer.close()
        return self.rows


class Rounds:
    """A job from its start to its last comparison.

    Args:
        cluster: of `open_cluster`. brokers: how many; one that is killed must not be the only one.
    """

    def __init__(
        self,
        folder: Path,
        mode: str,
        sink: str,
        seed: int = 1,
        *,
        cluster: str = TWO_HOSTS,
        brokers: int = 3,
    ) -> None:
        self._folder, self._mode, self._sink = folder, mode, sink
        self._kind, self._brokers = cluster, brokers
        self._drawn = random.Random(seed)
        self._driver: subprocess.Popen[bytes] | None = None
        self._token = f"kafka-{os.getpid()}"

    def run(self, rounds: int, kinds: Sequence[str], minutes: float = 60.0) -> bool:
        """All rounds; whether every row is right."""
        # Spark's connector; a continuous job does not use it.
        jars = ",".join(map(str, connector_jars())) if self._mode != "continuous" else ""
        kafka = start_kafka(self._folder / "kafka", self._brokers)
        try:
            self._make_topics(kafka)
            given = {"mode": self._mode, "sink": self._sink, "servers": kafka.bootstrap}
            with (
                guarded(self._token),
                open_cluster(self._kind, self._folder, self._token) as self._cluster,
            ):
                self._given = Given(
                    **given,
                    source="in",
                    target="out",
                    master=self._cluster.master,
                    folder=str(self._folder),
                    jars=jars,
                )
                return self._rounds(kafka, rounds, kinds, time.monotonic() + 60 * minutes)
        finally:
            kafka.stop()

    def _make_topics(self, kafka: KafkaCluster) -> None:
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 2})
        topics = [NewTopic("in", 3, self._brokers), NewTopic("out", 2, self._brokers)]
        for made in admin.create_topics(topics).values():
            made.result()

    def _rounds(
        self, kafka: KafkaCluster, rounds: int, kinds: Sequence[str], until_s: float
    ) -> bool:
        feeder = Feeder(kafka.bootstrap, "in")
        lake = self._sink in ("delta", "iceberg")
        reader = LakeReader(self._sink, self._folder) if lake else Reader(kafka.bootstrap, "out", 2)
        self._start_driver()
        feeder.start()
        reader.start()
        self._until(lambda: reader.has(100))
        made: Counter[str] = Counter()
        for number in range(rounds):
            kind = kinds[number % len(kinds)]
            if time.monotonic() > until_s:
                break
            began_s = time.monotonic()
            time.sleep(self._drawn.uniform(0.0, 2.0))  # at any moment of a checkpoint
            self._strike(kind, kafka)
            time.sleep(2.0)
            wanted = feeder.acked  # some of them sent after the kill
            self._until(lambda wanted=wanted: reader.has(wanted))
            made[kind] += 1
            twice = sum(count - 1 for count in reader.rows.copy().values())
            took_s = time.monotonic() - began_s
            print(
                f"{number:3} {kind:9} {took_s:5.1f} s  {wanted} rows, {twice} twice; "
                f"restarts so far: {self._restarts()}",
                flush=True,
            )
        fed = feeder.end()
        self._until(lambda: reader.has(fed))
        (self._folder / "over").touch()
        assert self._driver is not None
        self._driver.wait(120)
        return self._compare(reader.end(), fed, made)

    def _compare(self, rows: Counter[Row], fed: int, made: Counter[str]) -> bool:
        wanted = truth(fed)
        twice = sum(count - 1 for count in rows.values())
        missing, wrong = wanted - set(rows), set(rows) - wanted
        right = not missing and not wrong and (not twice or self._sink not in EXACTLY_ONCE)
        print(
            f"{self._mode}, {self._sink}: {dict(made)}; {fed} rows, {len(missing)} missing, "
            f"{len(wrong)} wrong, {twice} twice: {'right' if right else 'WRONG'}",
            *sorted(missing)[:3],
            *sorted(wrong)[:3],
            flush=True,
        )
        return right

    # --- processes -----------------------------------------------------------------------------

    def _start_driver(self) -> None:
        words = [sys.executable, "-m", "tests.kafkarounds.kafkajob"]
        with (self._folder / "driver.log").open("ab") as log:
            self._driver = subprocess.Popen(
                [*words, msgspec.json.encode(self._given).decode()],
                cwd=_ROOT,
                env={**self._cluster.driver_environment(), "PYTHONPATH": str(_ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _restarts(self) -> int:
        """How often the job itself began again, as its drivers have said."""
        return (self._folder / "driver.log").read_bytes().count(b" starts again in ")

    def _strike(self, kind: str, kafka: KafkaCluster) -> None:
        processes = self._cluster.processes
        if kind == "broker":
            number = self._drawn.randrange(len(kafka.brokers))
            kafka.restart(number, away_s=self._drawn.uniform(1.0, 5.0))
        elif kind == "driver":
            assert self._driver is not None
            self._driver.kill()
            self._driver.wait(30)
            processes.kill(processes.driver_jvms())
            self._start_driver()
        else:
            there = processes.executors if kind == "executor" else processes.python_workers
            found: list[int] = []
            self._until(lambda: found.extend(there()) or found)
            processes.kill([self._drawn.choice(found)])

    def _until(self, true: Any) -> None:
        """Wait; a driver that ended by itself is an error."""
        until_s = time.monotonic() + ROUND_LIMIT_S
        while not true():
            assert self._driver is not None
            if self._driver.poll() is not None:
                log = (self._folder / "driver.log").read_text(errors="replace")
                raise RuntimeError(f"The driver ended with {self._driver.poll()}: {log[-3000:]}")
            assert time.monotonic() < until_s, f"in vain; see {self._folder}"
            time.sleep(0.3)
