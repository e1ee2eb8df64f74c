"""Rules that every subtask sees, in one order, before the data of the same batch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import StringType, StructType

from recovery.inspect.verify import verify
from statebackend.schema.codec import codec_for
from statebackend.state.operator_state import decode_lists
from tests.spark.local.processors import Diverging, KeyCounter, Rules
from tests.spark.local.world import Input, job_store, manifests, read_slice, sources

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame

    from statebackend import StateBackend
    from tests.spark.local.world import World

KEY = StructType().add("k", StringType())
OUTPUT = "k string, id bigint, subtask string, rules string"


class Ruled:
    """A world with a second input: rules."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rules = Input(world.root / "rules", "name string, n bigint")

    def batch(self, *rules: tuple[str, int | None], keys: int = 16) -> None:
        """One more batch: rules, and rows of keys of every subtask."""
        self.rules.add([{"name": name, "n": n} for name, n in rules])
        self.world.input.add_keys(*(f"k{i}" for i in range(keys)))

    def frame(self, backend: StateBackend, processor: Any = None) -> DataFrame:
        spark = self.world.spark
        return backend.connect_broadcast(
            self.world.input.stream(spark),
            self.rules.stream(spark),
            keys="k",
            processor=processor or Rules(),
            output_schema=OUTPUT,
            uid="rules",
        )

    def run(self, processor: Any = None, **given: Any) -> StateBackend:
        backend = self.world.backend(**given)
        self.world.run(backend, self.frame(backend, processor))
        backend.wait_durable()
        return backend

    def seen(self) -> dict[int, list[str]]:
        """By batch: what each subtask had for rules; one item where all had the same."""
        found = {}
        for batch, rows in self.world.sink.batches().items():
            found[batch] = sorted({row["rules"] for row in rows})
        return found

    def subtasks(self, batch: int) -> int:
        """How many subtasks had rows in a batch."""
        return len({row["subtask"] for row in self.world.sink.batches()[batch]})


@pytest.fixture
def ruled(world: World) -> Ruled:
    return Ruled(world)


def said(*rules: tuple[str, int]) -> list[str]:
    return [json.dumps([[name, n] for name, n in rules])]


def slices(backend: StateBackend, kind: str) -> list[list[tuple[int, str | None]]]:
    """Of each record of the operator: (subtask, object) of its slices of a kind."""
    return [
        [(one.subtask, one.object) for one in manifest.slices if one.kind == kind]
        for manifest in manifests(backend)
        if manifest.kind == "checkpoint"
    ]


@pytest.mark.promise
def test_rules_are_in_force_from_their_batch_on_in_every_subtask(ruled: Ruled) -> None:
    ruled.batch(("a", 1), ("b", 2))
    ruled.batch(("b", 3), ("b", 4), ("a", None))
    ruled.batch()
    backend = ruled.run(parallelism=3)
    assert ruled.seen() == {0: said(("a", 1), ("b", 2)), 1: said(("b", 4)), 2: said(("b", 4))}
    assert ruled.subtasks(1) == 3
    assert slices(backend, "broadcast")[-3:] == [[(0, None)]] * 3, "stored once"
    assert [len(one) for one in slices(backend, "operator")[-3:]] == [3, 3, 3]


@pytest.mark.parametrize("commit", ["sync", "async"])
def test_rules_are_there_again_after_restarts_at_any_parallelism(ruled: Ruled, commit: str) -> None:
    ruled.batch(("a", 1), ("b", 2))
    ruled.batch(("c", 3))
    ruled.run(parallelism=2, commit=commit)
    ruled.batch()
    ruled.world.forget_local()
    ruled.run(parallelism=2, commit=commit)
    ruled.batch(("d", 4))
    ruled.run(parallelism=5, commit=commit)
    ruled.batch()
    ruled.batch(("a", None))
    backend = ruled.run(parallelism=3, commit=commit)
    abc = ("a", 1), ("b", 2), ("c", 3)
    expected = [said(*abc[:2]), said(*abc), said(*abc), said(*abc, ("d", 4)), said(*abc, ("d", 4))]
    assert ruled.seen() == dict(enumerate([*expected, said(*abc[1:], ("d", 4))]))
    assert ruled.subtasks(3) == 5
    assert set(sources(backend)) == {("rules", subtask) for subtask in range(3)}
    assert verify(job_store(backend), "default").findings == []


def stored_lists(backend: StateBackend) -> list[list[str]]:
    """Each subtask's list as the newest record has it."""
    lineage = backend.lineages()["rules"]
    refs = lineage.epochs[lineage.last_epoch].lists
    found = []
    for subtask in range(lineage.parallelism):
        (one,) = decode_lists(read_slice(backend, refs[subtask])).values()
        found.append([codec_for(KEY).decode(row)[0] for row in one.rows])
    return found


def test_lists_are_kept_at_one_parallelism_and_spread_at_another(ruled: Ruled) -> None:
    ruled.batch()
    first = stored_lists(ruled.run(KeyCounter(), parallelism=2))
    assert sorted(first[0] + first[1]) == sorted(f"k{i}" for i in range(16))
    ruled.batch()
    assert stored_lists(ruled.run(KeyCounter(), parallelism=2)) == first
    ruled.batch()
    whole = first[0] + first[1]
    spread = [whole[:4], whole[4:8], whole[8:12], whole[12:]]
    assert stored_lists(ruled.run(KeyCounter(), parallelism=4)) == spread
    ruled.batch()
    assert stored_lists(ruled.run(KeyCounter(), parallelism=1)) == [whole]
    seen = [sorted(json.loads(rules) for rules in some) for some in ruled.seen().values()]
    assert seen == [[[]], sorted(first), sorted(spread), [whole]], "the workers had these lists"


def test_large_state_has_objects_of_its_own_which_stay_while_it_does(ruled: Ruled) -> None:
    ruled.batch(*((f"r{i:05}", i) for i in range(3000)))
    ruled.batch()
    small = {"inline_limit_bytes": 4096}
    ruled.run(parallelism=2, settings=small)
    ruled.batch()
    backend = ruled.run(parallelism=3, settings=small)
    (first,), (second,), (third,) = slices(backend, "broadcast")[-3:]
    assert first[1] is not None
    assert first == second == third, "it was uploaded once"
    ruled.batch(("r00000", 7))
    backend = ruled.run(parallelism=3, settings=small)
    ((_, now),) = slices(backend, "broadcast")[-1]
    assert now not in (None, first[1])
    assert len({rules for rows in ruled.seen().values() for rules in rows}) == 2
    assert verify(job_store(backend), "default").findings == []


def test_subtasks_that_come_to_different_states_fail_the_batch(ruled: Ruled) -> None:
    ruled.batch(("a", 1))
    backend = ruled.world.backend(parallelism=2)
    text = ruled.world.fail(backend, ruled.frame(backend, Diverging()))
    assert "SB5008" in text
    assert ruled.world.committed() == []
    ruled.run(parallelism=2)
    assert ruled.seen() == {0: said(("a", 1))}


def test_rules_are_never_late_and_move_no_watermark(make_world: Callable[..., World]) -> None:
    world = make_world("timed", schema="k string, id bigint, at timestamp")
    rules = Input(world.root / "rules", "name string, n bigint, at timestamp")

    def batch(rule: int, minute: int) -> None:
        at = f"2024-01-01T00:{minute:02}:00Z"
        # Rules of times far ahead and long ago: nobody looks at them.
        year = 1999 if rule % 2 else 2099
        rules.add([{"name": "r", "n": rule, "at": f"{year}-01-01T00:00:00Z"}])
        world.input.add([{"k": f"k{i}", "id": 100 * rule + i, "at": at} for i in range(4)])

    for rule, minute in enumerate((30, 31, 5, 32)):
        batch(rule, minute)
    backend = world.backend(parallelism=2)
    frame = backend.connect_broadcast(
        world.input.stream(world.spark),
        rules.stream(world.spark),
        keys="k",
        processor=Rules(),
        output_schema=OUTPUT,
        uid="rules",
        time_mode="event",
        event_time="at",
        watermark_delay="10 minutes",
    )
    world.run(backend, frame)
    seen = {row["id"]: row["rules"] for row in world.sink.rows()}
    assert sorted({number // 100 for number in seen}) == [0, 1, 3], "those of batch 2 are late"
    assert {rules for number, rules in seen.items() if number >= 300} == set(said(("r", 3)))
    assert sum(event.late_rows for event in backend.progress().epochs) == 4
