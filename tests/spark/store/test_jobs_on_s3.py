"""A whole query with its durable copies on a real S3 server: results, requests, outages, damage."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from recovery.drill.proxy.fault_plan import Calm, stormy
from recovery.drill.proxy.s3_requests import Verb
from tests.spark.local.world import failure, manifests, sources

if TYPE_CHECKING:
    from tests.spark.store.conftest import StoreWorld

APART = {
    "inline_limit_bytes": 0,
    "base_every_epochs": 2,
    "base_apart_every_epochs": 2,
    "base_apart_min_bytes": 0,
    "base_apart_ratio": 0.0,
}


def total(world: StoreWorld) -> int:
    return sum(one.requests for one in world.proxy.counts().values())


def by_verb(world: StoreWorld) -> dict[str, int]:
    return {f"{v} {group}": c.requests for (v, group), c in world.proxy.counts().items()}


@pytest.mark.promise
def test_small_state_costs_one_request_per_operator_and_epoch(on_s3: StoreWorld) -> None:
    on_s3.input.add_batches(8)
    seen: list[tuple[int, dict[str, int]]] = []

    def sink(frame: Any, batch: int) -> None:
        on_s3.sink(frame, batch)
        seen.append((total(on_s3), by_verb(on_s3)))

    backend = on_s3.run_ledger(sink, parallelism=6, settings={"base_every_epochs": 4})
    steady = {v: n - seen[1][1].get(v, 0) for v, n in seen[7][1].items()}
    assert {v: n for v, n in steady.items() if n} == {"put_if log/": 6}
    on_s3.check(backend)


@pytest.mark.promise
def test_a_restart_from_the_store_reads_each_record_once(on_s3: StoreWorld) -> None:
    on_s3.input.add_batches(9)
    first = on_s3.run_ledger(parallelism=6)
    records = len([m for m in manifests(first) if m.kind == "checkpoint"])
    assert records == 9
    on_s3.forget_local()
    on_s3.input.add_batches(1)
    on_s3.proxy.reset()
    started: list[int] = []

    def sink(frame: Any, batch: int) -> None:
        on_s3.sink(frame, batch)
        started.append(total(on_s3))

    again = on_s3.run_ledger(sink, parallelism=6)
    assert set(sources(again).values()) == {"durable"}
    on_s3.check(again)
    claims = 1
    own_record = 1
    probe, no_savepoint = 4, 3
    assert started[0] <= records + claims + own_record + probe + no_savepoint + 6, by_verb(on_s3)


def test_asynchronous_commits_are_exact_over_restarts(on_s3: StoreWorld) -> None:
    on_s3.input.add_batches(5)
    on_s3.run_ledger(commit="async")
    on_s3.input.add_batches(3)
    on_s3.forget_local()
    again = on_s3.run_ledger(commit="async")
    on_s3.check(again)
    assert set(sources(again).values()) == {"durable"}


def test_a_batch_goes_on_while_the_record_before_is_being_written(on_s3: StoreWorld) -> None:
    on_s3.input.add_batches(1)
    on_s3.run_ledger(commit="async")
    on_s3.input.add_batches(4)
    on_s3.proxy.set_pace(latency_s=0.4)
    backend = on_s3.run_ledger(commit="async")
    on_s3.check(backend)
    on_s3.proxy.set_pace(latency_s=0.0)
    epochs = backend.progress().epochs
    assert len(epochs) == 4
    assert all(epoch.commit_ms >= 400 for epoch in epochs)


def test_large_state_is_uploaded_in_the_background_and_restored_from_its_files(
    on_s3: StoreWorld,
) -> None:
    settings = {**APART, "base_whole_limit_bytes": 0, "clean_every_epochs": 3}
    settings["clean_min_age_s"] = 0.0
    on_s3.input.add_batches(8)
    backend = on_s3.run_ledger(settings=settings)
    bases = backend.progress().bases
    assert bases
    assert {base.kind for base in bases} == {"files"}
    on_s3.check(backend)

    on_s3.forget_local()
    on_s3.input.add_batches(4)
    again = on_s3.run_ledger(settings=settings)
    assert set(sources(again).values()) == {"durable"}
    on_s3.check(again)


def test_state_of_middling_size_is_uploaded_as_one_object(on_s3: StoreWorld) -> None:
    on_s3.input.add_batches(8)
    backend = on_s3.run_ledger(settings=APART)
    bases = backend.progress().bases
    assert {base.kind for base in bases} == {"base"}
    assert all(sum(n for n, _ in base.requests.values()) == 1 for base in bases)
    on_s3.forget_local()
    on_s3.input.add_batches(2)
    again = on_s3.run_ledger(settings=APART)
    assert set(sources(again).values()) == {"durable"}
    on_s3.check(again)


@mock.patch("snapshot.retention.history_keeping.EPOCHS_AN_OBJECT", 1)
def test_what_nobody_needs_any_more_is_deleted_and_the_job_restarts_exactly(
    on_s3: StoreWorld, ministack: Any
) -> None:
    settings = {**APART, "clean_every_epochs": 4, "clean_min_age_s": 0.0}
    on_s3.input.add_batches(16)
    backend = on_s3.run_ledger(settings=settings)
    assert on_s3.proxy.count(Verb.DELETE_MANY).requests >= 1
    store = backend._job.store
    names = [info.name for info in store.list("")]
    needed = {m.sequence for m in manifests(backend)}
    assert len([n for n in names if n.startswith("log/")]) < 16
    assert min(needed) > 0
    on_s3.check(backend)
    on_s3.forget_local()
    on_s3.input.add_batches(2)
    again = on_s3.run_ledger(settings=settings)
    assert set(sources(again).values()) == {"durable"}
    on_s3.check(again)


def test_a_store_that_is_down_for_a_while_delays_the_batch_and_nothing_else(
    on_s3: StoreWorld,
) -> None:
    on_s3.input.add_batches(6)
    down = threading.Event()

    def sink(frame: Any, batch: int) -> None:
        if batch == 2:
            on_s3.proxy.go_down()
            down.set()
            threading.Timer(4.0, on_s3.proxy.come_up).start()
        on_s3.sink(frame, batch)

    started_s = time.monotonic()
    backend = on_s3.run_ledger(sink, settings={"s3_deadline_s": 1.0})
    assert down.is_set()
    assert time.monotonic() - started_s >= 4.0
    on_s3.check(backend)
    assert backend.failure is None


@pytest.mark.parametrize("commit", ["sync", "async"])
def test_a_fifth_of_all_requests_going_wrong_costs_time_only(
    on_s3: StoreWorld, commit: str
) -> None:
    on_s3.input.add_batches(8)
    backend = on_s3.backend(
        commit=commit, settings={**APART, "base_whole_limit_bytes": 0, "s3_deadline_s": 20.0}
    )
    frame = on_s3.ledger(backend)
    on_s3.proxy.plan = stormy(0.2)
    on_s3.run(backend, frame)
    on_s3.proxy.plan = Calm()
    on_s3.check(backend)


def test_a_damaged_object_is_named_and_a_local_copy_makes_it_unnecessary(
    on_s3: StoreWorld,
) -> None:
    on_s3.input.add_batches(3)
    settings = {"inline_limit_bytes": 0}
    backend = on_s3.run_ledger(settings=settings)
    store = backend._job.store
    damaged = next(info.name for info in store.list("data/") if info.size_bytes)
    body = bytearray(store.get(damaged))
    body[len(body) // 2] ^= 1
    store.put(damaged, [bytes(body)])

    on_s3.input.add_batches(1)
    again = on_s3.run_ledger(settings=settings)
    assert set(sources(again).values()) == {"local"}

    on_s3.forget_local()
    on_s3.input.add_batches(1)
    lost = on_s3.backend(settings=settings)
    text = failure(on_s3.start(lost, on_s3.ledger(lost)))
    assert "SB3001" in text
    assert damaged in text
    assert "'ledger'" in text


def test_progress_says_what_each_epoch_cost(on_s3: StoreWorld, caplog: Any) -> None:
    on_s3.input.add_batches(3)
    with caplog.at_level("INFO", logger="statebackend.progress"):
        backend = on_s3.run_ledger(job="progress", settings={"inline_limit_bytes": 0})
    progress = backend.progress()
    assert progress.durable_epoch == 2
    assert [epoch.epoch for epoch in progress.epochs] == [0, 1, 2]
    assert len(progress.subtasks) == 6
    rows = sum(one.figures["rows"] for one in progress.subtasks)
    assert rows == len(on_s3.input.rows)
    put = [one.requests.get("put", (0, 0)) for one in progress.subtasks if one.delta_bytes]
    assert {requests for requests, _ in put} == {1}
    assert sum(size for _, size in put) == sum(one.delta_bytes for one in progress.subtasks)
    events = [r.message for r in caplog.records if r.name == "statebackend.progress"]
    own = [event for event in map(json.loads, events) if event["job"] == "progress"]
    assert [event["event"] for event in own].count("subtask") == 6
    assert [event["event"] for event in own].count("epoch") == 3


def test_the_store_s_outage_beyond_all_patience_ends_the_query_and_a_restart_is_exact(
    on_s3: StoreWorld,
) -> None:
    on_s3.input.add_batches(4)

    def sink(frame: Any, batch: int) -> None:
        if batch == 2:
            on_s3.proxy.go_down()
        on_s3.sink(frame, batch)

    settings = {"s3_deadline_s": 0.5, "commit_timeout_s": 2.0}
    backend = on_s3.backend(settings=settings)
    text = failure(on_s3.start(backend, on_s3.ledger(backend), sink))
    assert "SB4002" in text, text
    assert backend.failure is not None
    on_s3.proxy.come_up()
    again = on_s3.run_ledger()
    on_s3.check(again)
