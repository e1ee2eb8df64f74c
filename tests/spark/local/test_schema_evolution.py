"""A query started again with other schemas of its states: it goes on, or is refused unharmed."""

from __future__ import annotations

import datetime
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from pyspark.cloudpickle import register_pickle_by_value
from pyspark.sql.types import Row

from statebackend import KeyedProcessor
from statebackend.errors import SchemaError, StateMismatchError
from statebackend.runtime.driver import job_start
from tests.spark.local.processors import LEDGER_OUTPUT, Ledger, once
from tests.spark.local.world import checkpoints, durable_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame

    from statebackend import ProcessorContext, StateBackend
    from tests.spark.local.world import World

register_pickle_by_value(sys.modules[__name__])  # workers need not find this module

KEYS = ["a", "b", "c", "d", "e"]


class First(KeyedProcessor):
    """Counts, sums and lists the ids of each key; ``flag``: fails once, while the file is there."""

    acc, ids, last = "n int, total bigint, unused string", "id bigint", "id int"

    def __init__(self, flag: str = "") -> None:
        self.flag = flag

    def open(self, ctx: ProcessorContext) -> None:
        self.state = ctx.value_state("acc", self.acc)
        self.all = ctx.list_state("ids", self.ids)
        self.by_rest = ctx.map_state("last", "rest int", self.last)

    def process(self, key: Any, rows: Any, ctx: ProcessorContext) -> Iterator[Any]:
        ids = [row.id for row in rows]
        n, total = self.added(ids)
        for one in ids:
            self.all.append(self.element(one))
            self.by_rest.update_value((one % 2,), self.entry(one))
        yield key[0], ids, n, total
        if self.flag and once(self.flag):
            raise RuntimeError("once only")

    def added(self, ids: list[int]) -> tuple[int, int]:
        n, total, _ = self.state.get() or (0, 0, None)
        self.state.update((n + len(ids), total + sum(ids), "x"))
        return n + len(ids), total + sum(ids)

    def element(self, one: int) -> Any:
        return (one,)

    def entry(self, one: int) -> Any:
        return (one,)


class Second(First):
    """A field dropped, one added with a default, one widened, all in another order."""

    acc = "total bigint, since date DEFAULT DATE '2020-02-02', n bigint"
    ids = "id bigint, note string"
    last = "times int NOT NULL DEFAULT -1, id double"

    def added(self, ids: list[int]) -> tuple[int, int]:
        total, since, n = self.state.get() or (0, None, 0)
        self.state.update((total + sum(ids), since, n + len(ids)))
        return n + len(ids), total + sum(ids)

    def element(self, one: int) -> Any:
        return one, "second"

    def entry(self, one: int) -> Any:
        return 2, one


class Impossible(Second):
    acc = "total int, since date, n bigint"


class Renamed(Second):
    """Its map has a key of another name."""

    def open(self, ctx: ProcessorContext) -> None:
        self.state = ctx.value_state("acc", self.acc)
        self.all = ctx.list_state("ids", self.ids)
        self.by_rest = ctx.map_state("last", "parity int", self.last)


def _frame(world: World, backend: StateBackend, processor: Any) -> DataFrame:
    return backend.process(
        world.input.stream(world.spark),
        keys="k",
        processor=processor,
        output_schema=LEDGER_OUTPUT,
        uid="op",
    )


def _run(world: World, processor: Any, **given: Any) -> StateBackend:
    backend = world.backend(**given)
    world.run(backend, _frame(world, backend, processor))
    backend.wait_durable()
    return backend


def _check_output(world: World) -> None:
    """Each row counted once, on top of those before, whatever the schema was."""
    seen: dict[str, list[int]] = {}
    for _, out in sorted(world.sink.batches().items()):
        for row in out:
            own = seen.setdefault(row["k"], [])
            own += row["ids"]
            assert (row["n"], row["total"]) == (len(own), sum(own))
    assert seen == world.input.ids()


@pytest.mark.parametrize("commit", ["sync", "async"])
def test_states_go_on_with_fields_added_dropped_widened_and_reordered(
    world: World, commit: str
) -> None:
    world.input.add_keys(*KEYS)
    world.input.add_keys(*KEYS)
    _run(world, First(), commit=commit)
    # Some keys are touched under the new schemas, others are not; some copies are local.
    world.input.add_keys("a", "b")
    backend = _run(world, Second(), commit=commit)
    world.forget_local()
    world.input.add_keys("b", "c")
    backend = _run(world, Second(), commit=commit)
    _check_output(world)
    state, truth, day = durable_state(backend, "op"), world.input.ids(), datetime.date(2020, 2, 2)
    assert state["acc"] == {(k,): (sum(own), day, len(own)) for k, own in truth.items()}
    for key, own in truth.items():
        notes = {one: None if one <= 10 else "second" for one in own}
        assert state["ids"][(key,)] == list(notes.items())
        for rest, (times, last) in state["last"][(key,)].items():
            assert last == max(one for one in own if one % 2 == rest[0])
            assert times == (-1 if last <= 10 else 2)


@pytest.mark.promise
def test_an_impossible_change_is_refused_and_harms_nothing(world: World) -> None:
    world.input.add_keys(*KEYS)
    _run(world, First())
    world.input.add_keys(*KEYS)
    backend = _run(world, Second())
    before, state = checkpoints(backend), durable_state(backend, "op")
    world.input.add_keys(*KEYS)
    with pytest.raises(StateMismatchError) as caught:
        _run(world, Impossible())
    assert "State 'acc' of operator 'op'" in caught.value.what
    assert "field 'total' is bigint in the checkpoint and int now" in caught.value.what
    assert "Keep it bigint" in caught.value.todo
    with pytest.raises(StateMismatchError, match=r"field 'rest' \(int\) is renamed to 'parity'"):
        _run(world, Renamed())
    with pytest.raises(StateMismatchError, match="field 'n' is bigint in the checkpoint and int"):
        _run(world, First())  # there is no way back once rows may be wide
    assert checkpoints(backend) == before
    assert durable_state(backend, "op") == state
    _run(world, Second())
    _check_output(world)


def test_a_change_whose_first_epoch_never_ended_can_be_taken_back(world: World) -> None:
    flag = world.root / "flag"
    flag.touch()
    world.input.add_keys(*KEYS)
    _run(world, First())
    world.input.add_keys(*KEYS)
    backend = world.backend()
    assert "once only" in world.fail(backend, _frame(world, backend, Second(str(flag))))
    _run(world, First())
    world.input.add_keys(*KEYS)
    _run(world, Second())
    _check_output(world)


class Longer(Ledger):
    """Spark's own interface, with more in its state."""

    def init(self, handle: Any) -> None:
        self.state = handle.getValueState(
            "acc", "most bigint DEFAULT 0, total decimal(38,0), n bigint"
        )

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        from decimal import Decimal

        ids = [row["id"] for row in rows]
        most, total, n = self.state.get() or (0, Decimal(0), 0)
        most, total, n = max(most, *ids), total + sum(ids), n + len(ids)
        self.state.update((most, total, n))
        yield Row(k=key[0], ids=ids, n=n, total=int(total))


def test_states_of_sparks_own_interface_go_on_too(world: World) -> None:
    world.input.add_keys(*KEYS)
    world.run_ledger()
    world.input.add_keys("a", "b")
    backend = world.backend()
    world.run(backend, world.ledger(backend, processor=Longer()))
    _check_output(world)
    state, truth = durable_state(backend, "ledger")["acc"], world.input.ids()
    assert state == {
        (k,): (own[-1] if len(own) > 1 else 0, sum(own), len(own)) for k, own in truth.items()
    }


def test_a_default_is_checked_when_the_frame_is_made(world: World) -> None:
    class Wrong(First):
        acc = "n int DEFAULT 'none', total bigint, unused string"

    with pytest.raises(SchemaError, match="The default of field 'n'"):
        _frame(world, world.backend(), Wrong())


def test_versions_that_another_driver_gave_meanwhile_refuse_the_start(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.input.add_keys(*KEYS)
    _run(world, First())
    backend = world.backend()
    frame = _frame(world, backend, Second())
    known = job_start.operator_specs
    seen: list[Any] = []

    def specs(*args: Any, **given: Any) -> Any:
        """The second look is into a log in which another record came last."""
        made = known(*args, **given)
        seen.append(made)
        if len(seen) > 1:
            schemas = {**made["op"].schemas, "acc": "{}"}
            made = {"op": msgspec.structs.replace(made["op"], schemas=schemas)}
        return made

    monkeypatch.setattr(job_start, "operator_specs", specs)
    world.input.add_keys(*KEYS)
    with pytest.raises(StateMismatchError, match="Another driver of job 'default'"):
        world.start(backend, frame)
    monkeypatch.undo()
    _run(world, Second())
    _check_output(world)
