"""State after epoch n is each input row of the epochs up to n, applied once; so is the output."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest

from snapshot.formats.record import record_name
from tests.spark.local.processors import Composite, Everything
from tests.spark.local.world import checkpoints, durable_state, manifests, setting, sources

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.spark.local.world import World


# --- restarts ----------------------------------------------------------------------------------


@pytest.mark.promise
def test_a_restarted_query_goes_on_from_its_local_copies(world: World) -> None:
    world.input.add_batches(2)
    backend = world.backend()
    frame = world.ledger(backend)
    world.run(backend, frame)
    world.check(backend)
    assert set(sources(backend).values()) == {"empty"}

    world.input.add_batches(2)
    world.run(backend, frame)
    world.check(backend)
    assert sources(backend) == {("ledger", 0): "local", ("ledger", 1): "local"}
    assert [r.durable_bytes for r in backend.restores()] == [0, 0]

    world.input.add_batches(1)
    again = world.run_ledger()
    world.check(again)
    assert [(r.source, r.durable_bytes) for r in again.restores()] == [("local", 0)] * 2
    assert checkpoints(again) == [("ledger", epoch) for epoch in range(5)]


@pytest.mark.promise
def test_a_lost_host_is_made_up_for_by_the_durable_copy(world: World) -> None:
    world.input.add_batches(2)
    world.check(world.run_ledger())
    world.forget_local()
    world.input.add_batches(1)
    backend = world.run_ledger()
    world.check(backend)
    assert set(sources(backend).values()) == {"durable"}
    assert all(r.durable_bytes > 0 for r in backend.restores())
    told: list[tuple[int, int]] = []
    assert backend.wait_restored(progress=lambda done, total: told.append((done, total)))
    assert told == [(2, 2)]
    assert {r.epoch for r in backend.restores()} == {1}


def test_local_copies_are_found_however_the_place_is_written(world: World) -> None:
    world.input.add_batches(1)
    world.run_ledger()
    world.input.add_batches(1)
    backend = world.run_ledger(uri=str(world.store))
    world.check(backend)
    assert set(sources(backend).values()) == {"local"}


def test_bases_take_the_place_of_what_came_before_them(world: World) -> None:
    world.input.add_batches(6)
    backend = world.run_ledger(settings={"base_every_epochs": 2})
    world.check(backend)
    found = manifests(backend)
    oldest = found[-1].oldest_needed
    assert oldest > 2, "some records are needed no more"
    assert any(entry.kind == "base" for m in found for entry in m.slices)

    for sequence in range(oldest):
        (world.store / "default" / record_name(sequence)).unlink(missing_ok=True)
    world.forget_local()
    world.input.add_batches(1)
    again = world.run_ledger(settings={"base_every_epochs": 2})
    world.check(again)
    assert set(sources(again).values()) == {"durable"}


# --- kinds of state and of keys ------------------------------------------------------------------

OPS = [
    ("a", "a"),
    ("b", "a"),
    ("a", "b"),
    ("c", "a"),
    ("a", "drop"),
    ("b", "unmap"),
    ("a", "a"),
    ("c", "b"),
    ("b", "put"),
    ("b", "a"),
    ("a", "unmap"),
    ("c", "drop"),
]


def everything(rows: list[dict[str, Any]]) -> dict[str, dict[tuple[str], Any]]:
    """What the processor of that name must end with, in plain Python."""
    last: dict[Any, Any] = {}
    ids: dict[Any, Any] = {}
    by_op: dict[Any, Any] = {}
    for row in rows:
        key, number, op = (row["k"],), row["id"], row["op"]
        if op == "drop":
            last.pop(key, None)
            ids.pop(key, None)
        elif op == "unmap":
            by_op.get(key, {}).pop(("a", number % 2), None)
        elif op == "put":
            ids[key] = [(number,)]
        else:
            last[key] = (number, f"{op}{number}")
            ids.setdefault(key, []).append((number,))
            slot = by_op.setdefault(key, {})
            n, _ = slot.get((op[:1], number % 2), (0, 0))
            slot[op[:1], number % 2] = (n + 1, number)
    return {"last": last, "ids": ids, "by_op": {k: v for k, v in by_op.items() if v}}


@pytest.mark.promise
def test_value_list_and_map_state_hold_what_was_put_into_them(
    make_world: Callable[..., World],
) -> None:
    world = make_world(schema="k string, id bigint, op string")
    numbers = iter(range(100))
    for _ in range(2):
        world.input.add([{"k": k, "id": next(numbers), "op": op} for k, op in OPS])
        world.input.add([{"k": k, "id": next(numbers), "op": op} for k, op in OPS[::-1]])
        backend = world.backend()
        frame = backend.transform_with_state(
            world.input.stream(world.spark),
            keys=["k"],
            processor=Everything(),
            output_schema="k string, text string",
            uid="everything",
        )
        world.run(backend, frame)
        truth = everything(world.input.rows)
        assert durable_state(backend, "everything") == truth
        world.forget_local()
    batches = world.sink.batches()
    for batch in (0, 3):
        truth = everything(world.input.rows[: 12 * (batch + 1)])
        for row in batches[batch]:
            key = (row["k"],)
            ids = [i for (i,) in truth["ids"].get(key, [])]
            entries = sorted((*k, *v) for k, v in truth["by_op"].get(key, {}).items())
            assert row["text"] == repr((truth["last"].get(key), ids, entries))


def test_keys_of_several_columns_may_be_null_in_some(make_world: Callable[..., World]) -> None:
    world = make_world(schema="`the name` string, b bigint, at timestamp, id bigint")
    keys = [
        {"the name": "x", "b": 1},
        {"the name": None, "b": 1},
        {"the name": "x", "b": None},
        {"the name": "", "b": 0, "at": "2026-01-01 00:00:00.000001"},
        {"the name": "äß日😀" * 50, "b": -(2**63), "at": None},
    ]
    counts: Counter[tuple[Any, ...]] = Counter()
    for batch in range(3):
        rows = [keys[i % 5] for i in range(batch, batch + 9)]
        world.input.add([{**row, "id": i} for i, row in enumerate(rows)])
        counts.update((r["the name"], r["b"], r.get("at")) for r in rows)
    backend = world.backend(parallelism=3)
    frame = backend.transform_with_state(
        world.input.stream(world.spark),
        keys=["the name", "b", "at"],
        processor=Composite(),
        output_schema="key string, n bigint",
        uid="composite",
    )
    world.run(backend, frame)
    state = durable_state(backend, "composite")["n"]
    assert {(*k[:2], k[2] and str(k[2])): n for k, (n,) in state.items()} == counts
    newest = {row["key"]: row["n"] for row in world.sink.rows()}
    utc = ZoneInfo("UTC")  # a processor sees timestamps in the session's zone
    shown = {(*k[:2], k[2] and k[2].replace(tzinfo=utc)): n for k, (n,) in state.items()}
    assert newest == {repr(key): n for key, n in shown.items()}


def test_a_columns_name_may_have_a_dot(make_world: Callable[..., World]) -> None:
    world = make_world(schema="k string, id bigint, `a.b` bigint")
    world.input.add_batches(1)
    world.check(world.run_ledger())


@pytest.mark.promise
def test_keys_that_are_equal_in_spark_are_one_key(make_world: Callable[..., World]) -> None:
    world = make_world(schema="k double, id bigint")
    for _ in range(2):
        world.input.add([{"k": k, "id": 1} for k in (0.0, -0.0, "NaN", 1.5, "-Infinity")])
    backend = world.backend(parallelism=3)
    frame = backend.transform_with_state(
        world.input.stream(world.spark),
        keys="k",
        processor=Composite(),
        output_schema="key string, n bigint",
        uid="doubles",
    )
    world.run(backend, frame)
    state = durable_state(backend, "doubles")["n"]
    found = sorted((str(k), n) for (k,), (n,) in state.items())
    assert found == [("-inf", 2), ("0.0", 4), ("1.5", 2), ("nan", 2)]


def test_a_constant_key_has_one_owner(world: World) -> None:
    from pyspark.sql import functions as F

    world.input.add_batches(2)
    backend = world.backend(parallelism=3)
    df = world.input.stream(world.spark).withColumn("k", F.lit("only"))
    world.run(backend, world.ledger(backend, df))
    world.check(backend, keyed={"only": [row["id"] for row in world.input.rows]})


# --- parallelism ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("parallelism", "partitions"), [(1, "3"), (3, "7"), (8, "2")])
def test_parallelism_need_not_be_that_of_spark(
    world: World, parallelism: int, partitions: str
) -> None:
    with setting(world.spark, "spark.sql.shuffle.partitions", partitions):
        world.input.add_batches(2, keys=30, rows=40)
        world.check(world.run_ledger(parallelism=parallelism))
        world.input.add_batches(1, keys=30, rows=40)
        backend = world.run_ledger(parallelism=None)  # the checkpoint knows
        world.check(backend)
    assert sources(backend) == {("ledger", i): "local" for i in range(parallelism)}


def test_a_changed_shuffle_setting_does_not_change_the_parallelism(world: World) -> None:
    with setting(world.spark, "spark.sql.shuffle.partitions", "3"):
        world.input.add_batches(1)
        world.check(world.run_ledger(parallelism=None))
    with setting(world.spark, "spark.sql.shuffle.partitions", "5"):
        world.input.add_batches(1)
        backend = world.run_ledger(parallelism=None)
    world.check(backend)
    assert backend.lineages()["ledger"].parallelism == 3
    assert len(backend.restores()) == 3


def test_empty_batches_and_idle_subtasks_are_epochs_too(world: World) -> None:
    world.input.add_keys("a")
    world.input.add([])
    world.input.add_keys("a", "a")
    backend = world.run_ledger(parallelism=4)
    world.check(backend)
    world.input.add([])
    world.check(world.run_ledger(parallelism=4))
    world.forget_local()
    world.input.add_keys("a", "b")
    backend = world.run_ledger(parallelism=4)
    world.check(backend)
    assert checkpoints(backend) == [("ledger", epoch) for epoch in range(5)]
