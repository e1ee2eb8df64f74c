"""Queries that begin with a savepoint which was made of tables."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import statebackend
from statebackend import OperatorState
from statebackend.errors import StateMismatchError
from tests.spark.local.world import durable_state

if TYPE_CHECKING:
    from tests.spark.local.world import World

KEYS = [f"k{n}" for n in range(7)]


def made(world: World, **more: Any) -> str:
    to = (world.root / "made").as_uri()
    rows = pa.table({"k": KEYS, "n": [10] * 7, "total": [1000] * 7})
    one = OperatorState("k string", {"acc": rows}, **more)
    statebackend.write_savepoint(to, {"ledger": one}, parallelism=3, max_parallelism=64)
    return to


@pytest.mark.promise
def test_a_query_goes_on_from_tables_and_is_started_again(world: World) -> None:
    savepoint = made(world)
    for _ in range(2):
        world.input.add_batches(2)
        backend = world.run_ledger(savepoint=savepoint)
        backend.wait_durable()
        truth = {k: (len(ids) + 10, sum(ids) + 1000) for k, ids in world.input.ids().items()}
        assert durable_state(backend, "ledger")["acc"] == {(k,): one for k, one in truth.items()}
    last: dict[str, tuple[int, int]] = defaultdict(tuple)
    for _, rows in sorted(world.sink.batches().items()):
        for row in rows:
            last[row["k"]] = row["n"], row["total"]
    assert last == truth
    assert min(world.sink.batches()) == 1, "batch 0 is the savepoint's"


@pytest.mark.parametrize("edited", [False, True])
def test_an_operator_with_timers_goes_on_from_tables_without_any(
    world: World, edited: bool
) -> None:
    savepoint = made(world)
    if edited:
        to = (world.root / "edited").as_uri()
        statebackend.edit_savepoint(savepoint, to, max_parallelism=32)
        savepoint = to
    for _ in range(2):
        world.input.add_batches(1)
        backend = world.backend(savepoint=savepoint)
        world.run(backend, world.ledger(backend, time_mode="processing"))
    truth = {k: (len(ids) + 10, sum(ids) + 1000) for k, ids in world.input.ids().items()}
    backend.wait_durable()
    assert durable_state(backend, "ledger")["acc"] == {(k,): one for k, one in truth.items()}


def test_state_that_the_processor_does_not_have_is_refused(world: World) -> None:
    to = (world.root / "made").as_uri()
    rows = pa.table({"k": KEYS, "n": ["text"] * 7, "total": [1] * 7})
    one = OperatorState("k string", {"acc": rows})
    statebackend.write_savepoint(to, {"ledger": one})
    world.input.add_batches(1)
    with pytest.raises(StateMismatchError, match="'acc'"):
        world.run_ledger(savepoint=to)
    assert not world.location.exists() or not list(world.location.glob("offsets/*"))
