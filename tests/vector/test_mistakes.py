"""What users do wrong in vectorised processors, and how they are told where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from statebackend.api.arrow import ArrowContext
from statebackend.errors import (
    KeyContextError,
    ProcessorError,
    StateMismatchError,
    UsageError,
    ValueMismatchError,
)
from statebackend.operators.arrow_calls import record_arrow_states
from tests.vector.trials import SOME, Body, Scripted, Totals, pairs, trial

BATCHES: list[tuple[str, Body]] = [
    ("was given a RecordBatch as its keys", lambda p, b, c: p.value.get(b)),
    ("was given a RecordBatch as its keys", lambda p, b, c: p.value.exists(c.keys.columns)),
    ("was given a ndarray as its keys", lambda p, b, c: p.map.items(c.keys.starts)),
    ("was given a list as its keys", lambda p, b, c: p.list.get([1])),
    ("was given a list as its keys", lambda p, b, c: p.list.delete([1])),
    ("was given a NoneType as its keys", lambda p, b, c: p.map.clear(None)),
    ("was given a list as its keys", lambda p, b, c: p.ttl_list.get(["a"])),
    ("was given a list as its keys", lambda p, b, c: p.ttl_list.append([1], [[1]])),
    ("was given a list as its keys", lambda p, b, c: p.list.put([1], [0], [[1]])),
    ("was given a list as its keys", lambda p, b, c: p.ttl_list.put([1], [0], [[1]])),
    ("'x' is bigint", lambda p, b, c: p.value.put(c.keys, [["a", "b"], ["a", "b"]])),
    ("'s' is string", lambda p, b, c: p.value.put(c.keys, {"x": [1, 2], "s": [1, 2]})),
    ("'x' is bigint", lambda p, b, c: p.value.put(c.keys, [np.array([1.5, 2]), ["", ""]])),
    (r"given 3 rows for 2 keys", lambda p, b, c: p.value.put(c.keys, [[1, 2, 3], [""] * 3])),
    (r"different lengths", lambda p, b, c: p.value.put(c.keys, [[1, 2, 3], ["", ""]])),
    (r"the fields \(x, s\)", lambda p, b, c: p.value.put(c.keys, [[1, 2]])),
    (r"the fields \(x, s\)", lambda p, b, c: p.value.put(c.keys, {"x": [1, 2], "y": [1, 2]})),
    (r"the fields \(x, s\)", lambda p, b, c: p.value.put(c.keys, b.select(["k"]))),
    ("was given a int", lambda p, b, c: p.value.put(c.keys, 5)),
    ("was given a NoneType", lambda p, b, c: p.value.put(c.keys, None)),
    ("was given a str", lambda p, b, c: p.value.put(c.keys, "ab")),
    ("'list'", lambda p, b, c: p.list.append(c.keys, [5])),
    ("'list'", lambda p, b, c: p.list.append(c.keys, [None])),
    ("'list'", lambda p, b, c: p.list.append(c.keys, ["ab"])),
    ("'list'", lambda p, b, c: p.list.append(c.keys, [pa.scalar(1)])),
    ("'list'", lambda p, b, c: p.list.append(c.keys, [[1, "a"]])),
    ("'list'", lambda p, b, c: p.list.append(c.keys, [np.zeros((2, 2))])),
    ("'list'", lambda p, b, c: p.list.append(c.keys, [[object(), object()]])),
    ("'list'", lambda p, b, c: p.list.append(c.keys, {"x": {1, 2}})),
    ("given 1 rows for 2", lambda p, b, c: p.list.append(c.keys, [[1]])),
    ("given 1 rows for 2", lambda p, b, c: p.ttl_list.append(c.keys, [[1]])),
    ("Place 2 was taken", lambda p, b, c: p.list.put(c.keys, [2], [[1]])),
    ("given 1 rows for 2", lambda p, b, c: p.list.put(c.keys, [1, 0], [[1]])),
    ("map keys of state 'map'", lambda p, b, c: p.map.get(c.keys, [["a"]])),
    ("'m' is string", lambda p, b, c: p.map.get(c.keys, [[1, 2]])),
    ("map keys of state 'map'", lambda p, b, c: p.map.put(c.keys, [["a"]], [[1, 2]])),
    ("given 1 rows", lambda p, b, c: p.map.put(c.keys, [["a", "b"]], [[1]])),
    ("map keys of state 'map'", lambda p, b, c: p.map.delete(c.keys, None)),
    ("outside open", lambda p, b, c: c.value_state("more", "x int")),
]


@pytest.mark.parametrize(("said", "body"), BATCHES, ids=range(len(BATCHES)))
def test_what_states_are_wrongly_given_is_refused_with_the_users_line(
    said: str, body: Body
) -> None:
    def wrong(self: Scripted, batch: pa.RecordBatch, ctx: ArrowContext) -> None:
        body(self, batch, ctx)

    with trial(wrong) as under_test, pytest.raises(UsageError, match=said) as caught:
        under_test.testBatch(SOME)
    assert not isinstance(caught.value, ProcessorError), caught.value
    assert "test_mistakes.py" in str(caught.value)


OUTPUTS: list[tuple[str, Any]] = [
    ("gave a int", lambda: [5]),
    (r"was given \(\)", lambda: [{}]),
    ("gave a tuple", lambda: [("a", 1.0)]),
    ("gave a int", lambda: 5),
    ("gave a float", lambda: iter([1.0])),
    (r"the fields \(k, total\)", lambda: pa.table({"k": ["a"]})),
    ("'total' is double", lambda: pa.table({"k": ["a"], "total": ["x"]})),
    ("'k' is string", lambda: pa.table({"x": [1.0], "y": ["a"]})),
    ("'k' is string", lambda: pa.record_batch({"k": [1.5], "total": [1]})),
]


@pytest.mark.parametrize(("said", "make"), OUTPUTS, ids=range(len(OUTPUTS)))
def test_output_of_another_kind_is_refused_with_where_it_comes_from(said: str, make: Any) -> None:
    with (
        trial(lambda p, b, c: make()) as under_test,
        pytest.raises(ValueMismatchError, match=said) as caught,
    ):
        under_test.testBatch(SOME)
    assert "trials.py" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (lambda: None, 0),
        (lambda: [], 0),
        (lambda: iter(()), 0),
        (lambda: pa.table({"k": ["a"], "total": [1]}), 1),
        (lambda: pa.table({"total": [1.0], "k": ["a"]}), 1),
        (lambda: pa.table({"x": ["a"], "y": [1.0]}), 1),
        (lambda: [pa.record_batch({"k": ["a", "b"], "total": pa.nulls(2)})] * 2, 4),
        (lambda: (pa.table({"k": [c], "total": [1.0]}) for c in "abc"), 3),
        (lambda: [pa.table({"k": pa.array([], pa.string()), "total": pa.nulls(0)})], 0),
        (lambda: pa.table({"k": pa.array(["a"]).dictionary_encode(), "total": [1.0]}), 1),
    ],
)
def test_output_is_taken_in_any_iterable_and_made_to_fit(make: Any, rows: int) -> None:
    with trial(lambda p, b, c: make()) as under_test:
        found = under_test.testBatch(SOME)
        assert found.schema == pa.schema([("k", pa.string()), ("total", pa.float64())])
        assert found.num_rows == rows


def test_output_may_be_yielded() -> None:
    class Yields(Totals):
        def process(self, batch: pa.RecordBatch, ctx: ArrowContext) -> Iterator[pa.RecordBatch]:
            made = super().process(batch, ctx)
            yield made.slice(0, 1)
            assert len(ctx.keys) == made.num_rows
            yield made.slice(1)

    with trial(Yields(), maxParallelism=1) as under_test:
        assert pairs(under_test.testBatch(SOME)) == {"a": 2.0, "b": 5.0}


def test_the_keys_of_a_batch_are_there_while_it_is_processed_only() -> None:
    class Keeps(Totals):
        def open(self, ctx: ArrowContext) -> None:
            super().open(ctx)
            self.ctx = ctx

        def close(self) -> None:
            _ = self.ctx.keys

    class Opens(Totals):
        def open(self, ctx: ArrowContext) -> None:
            _ = ctx.keys

    with pytest.raises(UsageError, match="outside process"):
        trial(Opens())
    with pytest.raises(UsageError, match="outside process"):
        trial(Keeps())

    class Later(Keeps):
        def __init__(self) -> None:
            super().__init__()
            self.closes = False

        def close(self) -> None:
            if self.closes:
                super().close()

    with trial(Later()) as under_test:
        under_test.testBatch(SOME)
        under_test.processor.closes = True
        with pytest.raises(UsageError, match="outside process"):
            under_test.testBatch(SOME)


def test_mistakes_in_the_processor_itself_are_refused_on_the_driver() -> None:
    class Short(Totals):
        def process(self, batch: pa.RecordBatch) -> None:  # type: ignore[override]
            pass

    class Twice(Totals):
        def open(self, ctx: ArrowContext) -> None:
            ctx.value_state("x", "x int")
            ctx.value_state("x", "x int")

    class Reads(Totals):
        def open(self, ctx: ArrowContext) -> None:
            ctx.value_state("x", "x int").get(None)  # type: ignore[arg-type]

    for processor, error, said in (
        (Totals, UsageError, "the class Totals"),
        (object(), UsageError, "a object as its processor"),
        (Short(), ProcessorError, "cannot be called with 2 arguments"),
        (Twice(), StateMismatchError, "declared twice"),
        (Reads(), KeyContextError, "belongs to no key"),
    ):
        with pytest.raises(error, match=said):
            record_arrow_states(processor, "u")


def test_an_initial_state_needs_on_initial_which_gives_nothing() -> None:
    class Returns(Totals):
        def on_initial(self, batch: pa.RecordBatch, ctx: ArrowContext) -> Any:
            return batch

    with pytest.raises(UsageError, match="no on_initial"):
        trial(lambda p, b, c: None, initialStateBatch=SOME)
    with pytest.raises(ValueMismatchError, match="returned something"):
        trial(Returns(), initialStateBatch=SOME)
