"""The commit log over S3 through a bad network, and drivers that take over from each other.

A seed fixes which request is hurt and how, and when drivers take over. What else differs from run
to run is the order in which the threads' requests arrive. STATEBACKEND_SEED=5 runs that one seed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from blake3 import blake3

from recovery.drill import Fault, FaultProxy, Kind, Rule, Script, Verb, stormy
from snapshot.formats.record import Manifest, Record, SliceEntry, parse_record, record_name
from snapshot.log.commit_log import CommitLog, Tenure
from snapshot.retention.garbage_collection import clean
from snapshot.retention.retention import view_of
from snapshot.storage import ObjectStore, StoreOptions, open_store
from statebackend.errors import (
    CommitUnknownError,
    FencedError,
    StateBackendError,
    StoreUnreachableError,
)
from tests.support.s3 import S3

SEEDS = (
    [int(os.environ["STATEBACKEND_SEED"])] if "STATEBACKEND_SEED" in os.environ else [11, 12, 13]
)
COMMITS = 110  # of each seed
DRIVERS = 3
FAULT_SHARE = 0.2
WAIT_S = 300.0

_counter = itertools.count()


def new_id() -> str:
    return f"id{next(_counter)}"


def slice_of(epoch: int, body: bytes) -> SliceEntry:
    return SliceEntry(
        operator="op",
        subtask=0,
        kind="delta",
        epoch=epoch,
        key_group_start=0,
        key_group_end=127,
        attempt=0,
        rows=1,
        size_bytes=len(body),
        digest=blake3(body).hexdigest(),
        chain="",
    )


def checkpoint(epoch: int, body: bytes, oldest_needed: int = 0) -> Manifest:
    return Manifest(
        kind="checkpoint",
        job="",
        job_id="",
        generation=0,
        sequence=0,
        writer="",
        write_id="",
        oldest_needed=oldest_needed,
        epoch=epoch,
        slices=[slice_of(epoch, body)],
    )


class Tries:
    """Patience without a clock: the same write again, this many times."""

    def __init__(self, count: int) -> None:
        self._count = count

    def wait(self, attempt: int, error: StateBackendError) -> bool:
        return attempt <= self._count


def log_on(store: ObjectStore, writer: str, tries: int = 0) -> CommitLog:
    return CommitLog(store, job="clicks", writer=writer, new_id=new_id, patience=Tries(tries))


def raw_records(server: S3, uri: str) -> dict[int, tuple[bytes, Record]]:
    """Every record by its number, read past the proxy and past the store and the log."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    with contextlib.closing(server.client()) as client:
        found = {}
        pages = client.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, Prefix=f"{prefix}/log/"
        )
        for item in (item for page in pages for item in page.get("Contents", [])):
            name = item["Key"].removeprefix(f"{prefix}/")
            data = client.get_object(Bucket=bucket, Key=item["Key"])["Body"].read()
            number = int(name.removeprefix("log/").removesuffix(".ckpt"))
            found[number] = (data, parse_record(data, name))
    return found


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


# --- answers of which only the head arrives ------------------------------------------------------


@pytest.mark.parametrize("fixed_length", [False, True])
def test_a_listing_that_lost_its_body_is_not_taken_for_an_empty_log(
    ministack: S3, proxy: FaultProxy, fixed_length: bool
) -> None:
    uri = ministack.fresh_uri()
    log = log_on(impatient(ministack, proxy, uri, deadline_s=10.0), "a")
    log.claim()
    proxy.reset()
    lost = Fault.truncate(0.0, fixed_length=fixed_length)
    proxy.plan = Script(Rule(fault=lost, verbs={Verb.LIST}, nth={1}))
    assert [m.writer for m in log.manifests()] == ["a"]


# --- writes that land late -----------------------------------------------------------------------


@pytest.fixture
def proxy(ministack: S3) -> Iterator[FaultProxy]:
    address = ministack.plain_url.removeprefix("http://")
    with FaultProxy(address, tls=ministack.certificates.server) as proxy:
        yield proxy


def impatient(server: S3, proxy: FaultProxy, uri: str, *, deadline_s: float = 0.2) -> ObjectStore:
    """A store behind the proxy that does not wait long: for what is held, or tried again."""
    options = StoreOptions(
        endpoint_url=proxy.url,
        region="us-east-1",
        ca_bundle=str(server.certificates.ca_bundle),
        deadline_s=deadline_s,
        read_timeout_s=1.0,
    )
    return open_store(uri, new_id=new_id, options=options)


def hold_next_commit() -> Script:
    return Script(Rule(fault=Fault.hold(), verbs={Verb.PUT_IF}, group="log/"))


@pytest.mark.parametrize("lands_first", [True, False])
def test_a_commit_that_lands_after_its_driver_gave_up_is_seen_or_shut_out(
    ministack: S3, proxy: FaultProxy, lands_first: bool
) -> None:
    uri = ministack.fresh_uri()
    straight = open_store(uri, new_id=new_id, options=ministack.options())
    old_log = log_on(impatient(ministack, proxy, uri), "old")
    new_log = log_on(straight, "new")
    old = log_on(straight, "old").claim()
    proxy.plan = hold_next_commit()
    with pytest.raises(CommitUnknownError):
        old_log.append(old, checkpoint(0, b"late"), [b"late"])
    assert proxy.wait_held(timeout_s=10)

    if lands_first:
        proxy.release()
        assert proxy.wait_idle(timeout_s=10)
    new = new_log.claim()
    if not lands_first:
        proxy.release()
        assert proxy.wait_idle(timeout_s=10)
    new_log.append(new, checkpoint(0, b"after"), [b"after"])
    with pytest.raises(CommitUnknownError):  # in doubt for ever, whatever became of it
        old_log.append(old, checkpoint(1, b""), [b""])
    kinds = [(record.manifest.kind, record.manifest.writer) for record in in_order(ministack, uri)]
    late = [("checkpoint", "old")] if lands_first else []
    assert kinds == [("claim", "old"), *late, ("claim", "new"), ("checkpoint", "new")]


def in_order(server: S3, uri: str) -> list[Record]:
    return [record for _, (_, record) in sorted(raw_records(server, uri).items())]


def test_a_commit_tried_again_while_its_first_try_is_still_under_way_counts_once(
    ministack: S3, proxy: FaultProxy
) -> None:
    uri = ministack.fresh_uri()
    log = log_on(impatient(ministack, proxy, uri), "a", tries=5)
    straight = open_store(uri, new_id=new_id, options=ministack.options())
    tenure = log_on(straight, "a").claim()
    proxy.plan = Script(
        Rule(fault=Fault.hold(), verbs={Verb.PUT_IF}, group="log/", nth=range(1, 2))
    )
    assert log.append(tenure, checkpoint(0, b"body"), [b"body"]) == 1
    assert log.append(tenure, checkpoint(1, b"next"), [b"next"]) == 2
    assert proxy.release() == 1
    assert proxy.wait_idle(timeout_s=10)
    assert log.append(tenure, checkpoint(2, b"last"), [b"last"]) == 3
    assert [record.manifest.epoch for record in in_order(ministack, uri)] == [-1, 0, 1, 2]


def test_a_late_twin_of_a_record_that_retention_deleted_changes_nothing_that_counts(
    ministack: S3, proxy: FaultProxy
) -> None:
    uri = ministack.fresh_uri()
    straight = open_store(uri, new_id=new_id, options=ministack.options())
    log = log_on(straight, "a")
    tenure = log.claim()
    proxy.plan = Script(Rule(fault=Fault.hold(), verbs={Verb.PUT_IF}, group="log/", nth={1}))
    hasty = log_on(impatient(ministack, proxy, uri), "a", tries=5)
    first = hasty.append(tenure, checkpoint(0, b""), [b""])
    tip = log.append(tenure, checkpoint(1, b"", oldest_needed=2), [b""])
    straight.delete([record_name(first)])
    assert proxy.release() == 1
    assert proxy.wait_idle(timeout_s=10)
    assert sorted(raw_records(ministack, uri)) == [0, first, tip]  # the twin is back

    assert [m.sequence for m in log.manifests()] == [tip]
    # A cleaning that takes all below the tip for cleaned, and knows of no kinds, finds it.
    view = replace(view_of(log.manifests(), {}, kinds={}), cleaned_below=tip)
    report = clean(straight, lambda: view)
    assert report.removed["records"].objects == 1
    assert sorted(raw_records(ministack, uri)) == [0, tip]
    assert log.append(tenure, checkpoint(2, b"", oldest_needed=2), [b""]) == tip + 1
    successor = log_on(straight, "b").claim()
    assert (successor.sequence, successor.generation) == (tip + 2, 2)
    with pytest.raises(FencedError):
        log.append(tenure, checkpoint(3, b"", oldest_needed=2), [b""])


# --- sleepers ------------------------------------------------------------------------------------


def test_a_driver_that_slept_through_a_takeover_and_a_cleaning_is_fenced(ministack: S3) -> None:
    uri = ministack.fresh_uri()
    store = open_store(uri, new_id=new_id, options=ministack.options())
    sleeper_log, log = log_on(store, "sleeper"), log_on(store, "awake")
    sleeper = sleeper_log.claim()
    tenure = log.claim()
    for epoch in range(50):
        oldest_needed = max(tenure.oldest_needed, tenure.next_sequence - 3)
        log.append(tenure, checkpoint(epoch, b"", oldest_needed), [b""])
    records = raw_records(ministack, uri)
    gone = [
        record_name(number)
        for number, (_, record) in records.items()
        if record.manifest.kind != "claim" and number < tenure.oldest_needed
    ]
    store.delete(gone)
    left = raw_records(ministack, uri)
    assert len(gone) > 40
    with pytest.raises(FencedError, match="awake"):
        sleeper_log.append(sleeper, checkpoint(0, b""), [b""])
    assert {number: data for number, (data, _) in raw_records(ministack, uri).items()} == {
        number: data for number, (data, _) in left.items()
    }
    assert log.append(tenure, checkpoint(50, b"", tenure.oldest_needed), [b""]) == 52


def test_two_sleepers_in_a_row_are_both_fenced_and_the_third_goes_on(ministack: S3) -> None:
    uri = ministack.fresh_uri()
    store = open_store(uri, new_id=new_id, options=ministack.options())
    logs = [log_on(store, name) for name in ("first", "second", "third")]
    tenures = [log.claim() for log in logs]
    for log, tenure in zip(logs[:2], tenures[:2], strict=True):
        with pytest.raises(FencedError):
            log.append(tenure, checkpoint(0, b""), [b""])
    assert logs[2].append(tenures[2], checkpoint(0, b"x"), [b"x"]) == 3
    assert [m.writer for m in logs[2].manifests()] == ["first", "second", "third", "third"]
