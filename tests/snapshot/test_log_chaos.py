"""The commit log over S3 through a bad network, and drivers that take over from each other.

A seed fixes which request is hurt and how, and when drivers take over. What else differs from run
to run is the order in which the threads' requests arrive. STATEBACKEND_SEED=5 runs that one seed.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from recovery.drill import FaultProxy, Kind, stormy
from snapshot.formats.record import Record
from snapshot.log.commit_log import CommitLog, Tenure
from snapshot.storage import ObjectStore, StoreOptions, open_store
from statebackend.errors import CommitUnknownError, FencedError, StoreUnreachableError
from tests.snapshot.logs import new_id
from tests.snapshot.logs_on_s3 import *  # noqa: F403
from tests.snapshot.logs_on_s3 import checkpoint, log_on, raw_records
from tests.support.s3 import S3

pytestmark = pytest.mark.full  # many drivers on a bad network

SEEDS = (
    [int(os.environ["STATEBACKEND_SEED"])] if "STATEBACKEND_SEED" in os.environ else [11, 12, 13]
)
COMMITS = 110  # of each seed
DRIVERS = 3
FAULT_SHARE = 0.2
WAIT_S = 300.0


# --- many drivers, a fifth of all requests hurt --------------------------------------------------


@dataclass(frozen=True)
class Ack:
    writer: str
    generation: int
    body: bytes


@dataclass
class World:
    """What the drivers of one seed were told, as they would tell it themselves."""

    seed: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    acks: dict[int, Ack] = field(default_factory=dict)
    unknown: list[tuple[int, Tenure, str]] = field(default_factory=list)
    fenced: list[tuple[int, Tenure, str]] = field(default_factory=list)
    claims: list[tuple[Tenure, str]] = field(default_factory=list)
    failed_claims: int = 0
    at_work: int = 0
    failed: bool = False  # an assertion of some driver's: the others need not wait for it

    @property
    def done(self) -> bool:
        return self.failed or len(self.acks) >= COMMITS

    def wait(self, ready: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.done or ready(), WAIT_S)

    def acked(self, sequence: int, ack: Ack) -> None:
        with self.changed:
            assert sequence not in self.acks, f"record {sequence} was acknowledged twice"
            self.acks[sequence] = ack
            self.changed.notify_all()

    def newest_generation(self) -> int:
        return max((tenure.generation for tenure, _ in self.claims), default=0)


class Driver:
    """Claims, commits for a while, goes to sleep, and tries once more when it has a successor."""

    def __init__(self, world: World, number: int, store: ObjectStore) -> None:
        self.world, self.number, self.store = world, number, store
        self.rng = random.Random(f"{world.seed}/{number}")

    def run(self) -> None:
        try:
            self.lives()
        except BaseException:
            with self.world.changed:
                self.world.failed = True
                self.world.changed.notify_all()
            raise

    def lives(self) -> None:
        for life in itertools.count():
            # The first claims come at once, all together.
            start = len(self.world.acks) + self.rng.randint(1, 12) * min(life, 1)
            self.world.wait(lambda start=start: len(self.world.acks) >= start or not self.busy())
            if self.world.done:
                return
            self.live(f"seed{self.world.seed}-driver{self.number}-life{life}")

    def busy(self) -> bool:
        return self.world.at_work > 0

    def live(self, writer: str) -> None:
        world = self.world
        with world.changed:
            world.at_work += 1
        log = log_on(self.store, writer, tries=self.rng.choice([0, 0, 3]))
        working = True
        try:
            tenure = self.claim(log, writer)
            while tenure is not None and not world.done and working:
                working = self.append(log, tenure, writer) and self.rng.random() > 0.07
        finally:
            with world.changed:
                world.at_work -= 1
                world.changed.notify_all()
        if tenure is not None and tenure.ended is None:
            world.wait(lambda: world.newest_generation() > tenure.generation)
            if not world.done:
                assert not self.append(log, tenure, writer), "a sleeper with a successor committed"

    def claim(self, log: CommitLog, writer: str) -> Tenure | None:
        world = self.world
        try:
            tenure = log.claim()
        except StoreUnreachableError:
            with world.changed:
                world.failed_claims += 1
            return None
        with world.changed:
            assert all(tenure.generation != other.generation for other, _ in world.claims)
            world.claims.append((tenure, writer))
            world.changed.notify_all()
        return tenure

    def append(self, log: CommitLog, tenure: Tenure, writer: str) -> bool:
        """One commit; whether there may be another."""
        sequence = tenure.next_sequence
        body = self.rng.randbytes(self.rng.choice([0, 100, 5_000, 70_000]))
        try:
            assert log.append(tenure, checkpoint(sequence, body), [body]) == sequence
        except CommitUnknownError:
            self.world.unknown.append((sequence, tenure, writer))
            with pytest.raises(CommitUnknownError):
                log.append(tenure, checkpoint(sequence, b"another"), [b"another"])
            return False
        except FencedError:
            self.world.fenced.append((sequence, tenure, writer))
            return False
        self.world.acked(sequence, Ack(writer, tenure.generation, body))
        return True


def run_world(seed: int, server: S3, uri: str, tls: bool) -> tuple[World, FaultProxy]:
    world = World(seed)
    address = server.plain_url.removeprefix("http://")
    context = server.certificates.server if tls else None
    with FaultProxy(address, seed=seed, plan=stormy(FAULT_SHARE), tls=context) as proxy:
        options = StoreOptions(
            endpoint_url=proxy.url,
            region="us-east-1",
            ca_bundle=str(server.certificates.ca_bundle) if tls else "",
            deadline_s=0.3,
            connect_timeout_s=5.0,
            read_timeout_s=5.0,
        )
        drivers = [
            Driver(world, number, open_store(uri, new_id=new_id, options=options))
            for number in range(DRIVERS)
        ]
        with ThreadPoolExecutor(DRIVERS) as pool:
            for running in [pool.submit(driver.run) for driver in drivers]:
                running.result(2 * WAIT_S)
    return world, proxy


def check_world(world: World, found: dict[int, tuple[bytes, Record]]) -> None:
    """What must hold whatever happened; knows nothing of how the log works."""
    manifests = {number: record.manifest for number, (_, record) in found.items()}
    assert sorted(manifests) == list(range(len(manifests))), "there is a gap"
    assert [m.sequence for m in manifests.values()] == list(manifests)
    assert len({m.job_id for m in manifests.values()}) == 1
    assert len({m.write_id for m in manifests.values()}) == len(manifests)
    generations = [manifests[number].generation for number in sorted(manifests)]
    assert generations == sorted(generations), "a generation fell"
    for number, manifest in manifests.items():
        newly = number == 0 or manifests[number - 1].generation < manifest.generation
        assert (manifest.kind == "claim") == newly, f"{number} is in a generation not its own"
    writers = {(m.generation, m.writer) for m in manifests.values()}
    assert len(writers) == len({generation for generation, _ in writers}), "two in a generation"

    for sequence, ack in world.acks.items():
        assert sequence in manifests, f"the acknowledged record {sequence} is lost"
        data, record = found[sequence]
        assert (record.manifest.writer, record.manifest.generation) == (ack.writer, ack.generation)
        assert data.startswith(ack.body)
        assert record.slice(record.manifest.slices[0]) == ack.body
    doubtful = {(sequence, writer) for sequence, _, writer in world.unknown}
    for number, manifest in manifests.items():
        if manifest.kind == "checkpoint" and number not in world.acks:
            assert (number, manifest.writer) in doubtful, f"{number} was refused, and is there"
    for sequence, tenure, writer in world.fenced:
        holder = manifests[sequence]
        assert holder.kind == "claim", f"{writer} was fenced by no claim"
        assert holder.writer != writer
        assert holder.generation > tenure.generation
    for tenure, writer in world.claims:
        assert manifests[tenure.sequence].writer == writer


@pytest.mark.timeout(900)
def test_a_log_survives_a_bad_network_and_many_drivers(ministack: S3) -> None:
    print(f"seeds {SEEDS}; STATEBACKEND_SEED=<one of them> runs it alone")
    places = [(seed, ministack.fresh_uri()) for seed in SEEDS]
    with ThreadPoolExecutor(len(SEEDS)) as pool:
        running = [
            pool.submit(run_world, seed, ministack, uri, seed % 3 != 0) for seed, uri in places
        ]
        worlds = [future.result() for future in running]
    outcomes: Counter[str] = Counter()
    faults: Counter[Kind] = Counter()
    for (world, proxy), (seed, uri) in zip(worlds, places, strict=True):
        count = proxy.count()
        faults.update(entry.fault for entry in proxy.requests() if entry.fault is not None)
        told = {
            "commits": len(world.acks),
            "claims": len(world.claims),
            "failed claims": world.failed_claims,
            "fenced": len(world.fenced),
            "unknown": len(world.unknown),
        }
        print(f"seed {seed}: {count.requests} requests, {count.faulted} hurt, {told}")
        outcomes.update(told)
        check_world(world, raw_records(ministack, uri))
        assert 0.1 < count.faulted / count.requests < 0.3
        straight = open_store(uri, new_id=new_id, options=ministack.options())
        assert len(log_on(straight, "reader").manifests()) == len(raw_records(ministack, uri))
    print(dict(faults))
    # The drill has drilled what it is for.
    assert outcomes["commits"] >= COMMITS * len(SEEDS)
    assert outcomes["fenced"] > 0
    if len(SEEDS) > 1:
        assert faults.keys() >= {
            *(Kind.STATUS, Kind.DROP_BEFORE, Kind.LOSE_ANSWER),
            *(Kind.DROP_IN_REQUEST, Kind.DUPLICATE, Kind.TRUNCATE),
        }


def test_the_checker_sees_what_is_wrong(ministack: S3) -> None:
    uri = ministack.fresh_uri()
    store = open_store(uri, new_id=new_id, options=ministack.options())
    log = log_on(store, "a")
    tenure = log.claim()
    world = World(0, claims=[(tenure, "a")])
    for number in range(3):
        body = b"%d" % number
        sequence = log.append(tenure, checkpoint(number, body), [body])
        world.acks[sequence] = Ack("a", 1, body)
    found = raw_records(ministack, uri)
    check_world(world, found)
    without_last = {number: record for number, record in found.items() if number != 3}
    with pytest.raises(AssertionError, match="lost"):
        check_world(world, without_last)
    with pytest.raises(AssertionError, match="gap"):
        check_world(world, {number: r for number, r in found.items() if number != 1})
    with pytest.raises(AssertionError, match="fenced by no claim"):
        check_world(World(0, acks=world.acks, fenced=[(2, tenure, "a")]), found)
    with pytest.raises(AssertionError, match="was refused"):
        check_world(World(0), found)
    world.acks[2] = Ack("a", 1, b"another body")
    with pytest.raises(AssertionError):
        check_world(world, found)
