"""Schemas, keys, values and processors that are wrong are refused where they are given."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import NullType, Row, StringType, StructField, StructType

from statebackend.errors import (
    ProcessorError,
    SchemaError,
    SettingError,
    UnsupportedQueryError,
    UnsupportedTypeError,
)
from tests.spark.local.processors import Ledger, Misfit, Rules, Stateless
from tests.spark.local.world import World, checkpoints, user_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame
from tests.spark.local.refused import *  # noqa: F403
from tests.spark.local.refused import _frame

# --- schemas, keys and values --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"output_schema": "n bigint oops int"}, SchemaError, "the output of operator 'ledger'"),
        ({"output_schema": 7}, SchemaError, "is a int"),
        ({"processor": Stateless(s="n bigiant")}, SchemaError, "state 's' of operator 'ledger'"),
        ({"keys": "nobody"}, SchemaError, "0 columns named 'nobody'"),
        ({"keys": []}, SchemaError, "The keys are"),
        ({"keys": ["k", "k"]}, SchemaError, "name a column twice"),
        ({"keys": ["k", 3]}, SchemaError, "The keys are"),
        ({"uid": ""}, SettingError, "the uid ''"),
        ({"processor": Stateless(s="v interval year")}, UnsupportedTypeError, "interval year"),
    ],
)
def test_what_cannot_be_is_refused_at_the_call(
    old: World, df: DataFrame, given: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        _frame(old.backend(), df, **given)


@pytest.mark.parametrize("ddl", ["k map<string, int>, id bigint", "k variant, id bigint"])
def test_a_key_of_an_unsupported_type_is_refused_at_the_call(old: World, ddl: str) -> None:
    df = old.spark.readStream.schema(ddl).json(str(old.input.folder))
    with pytest.raises(UnsupportedTypeError, match="'k'"):
        _frame(old.backend(), df)


@pytest.mark.parametrize("ddl", ["k string, id bigint, v variant"])
def test_a_column_that_arrow_cannot_carry_is_refused_with_its_name(old: World, ddl: str) -> None:
    df = old.spark.readStream.schema(ddl).json(str(old.input.folder))
    try:
        _frame(old.backend(), df)
    except UnsupportedTypeError as error:
        assert "'v'" in str(error)  # noqa: PT017  (either is fine, an untyped error is not)


def test_an_output_type_that_arrow_cannot_carry_is_refused_with_a_typed_error(
    old: World, df: DataFrame
) -> None:
    output = StructType([StructField("k", StringType()), StructField("nothing", NullType())])
    try:
        _frame(old.backend(), df, output_schema=output)
    except SchemaError as error:
        assert "nothing" in str(error)  # noqa: PT017


def test_a_static_frame_is_refused_where_rows_of_two_kinds_or_aggregates_are_asked_for(
    old: World, df: DataFrame
) -> None:
    static = old.spark.createDataFrame([("a", 1)], "k string, id bigint")
    backend: Any = old.backend()
    same = {"keys": "k", "processor": Rules(), "output_schema": "k string", "uid": "u"}
    for call in (
        lambda: backend.connect(df, static, **same),
        lambda: backend.connect(static, df, **same),
        lambda: backend.connect_broadcast(static, df, **same),
        lambda: backend.aggregate(static, keys="k", aggregations={"n": "count"}, uid="u"),
    ):
        with pytest.raises(SchemaError, match="not a streaming frame"):
            call()


def test_a_processor_that_cannot_be_pickled_is_refused_at_the_call(
    old: World, df: DataFrame
) -> None:
    processor = Ledger()
    processor.lock = threading.Lock()
    with pytest.raises(ProcessorError, match=r"cannot be shipped .*lock") as caught:
        _frame(old.backend(), df, processor)
    assert "in init(), not in __init__()" in str(caught.value)


def test_a_null_key_says_how_to_filter_it_out(world: World) -> None:
    world.input.add_keys("a", None, "b", None)
    backend = world.backend(parallelism=1)
    text = world.fail(backend, world.ledger(backend))
    assert "SB1004" in text
    assert "2 rows have a null key (column 'k')" in text
    assert 'df.where(col("k").isNotNull())' in text
    assert checkpoints(backend) == []


def test_a_value_that_does_not_fit_its_schema_is_named_with_the_users_line(world: World) -> None:
    world.input.add_keys("a")
    backend = world.backend(parallelism=1)
    text = world.fail(backend, world.ledger(backend, processor=Misfit()))
    assert "SB1005" in text
    assert "Field 'n' is bigint and cannot hold a value of type str" in text
    assert user_line("the user's misfit") in text


# --- in the processor ----------------------------------------------------------------------------


# What is said of each mistake: tests/api/mistakes. Here: that Spark passes it on, with the
# user's line, and that the batch leaves no trace.


class _Late(Ledger):
    def close(self) -> None:
        self.state.get()  # a look at no key


class _Timeless(Ledger):
    def init(self, handle: Any) -> None:
        super().init(handle)
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        yield from super().handleInputRows(key, rows, timerValues)
        self.handle.registerTimer(5)  # in no time mode


class _Scalars(Ledger):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        list(super().handleInputRows(key, rows, timerValues))
        return len(key)


class _Misspelt(Ledger):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        list(super().handleInputRows(key, rows, timerValues))
        yield Row(k=key[0], totel=1)  # a misspelt field


class _MisspeltFrames(Ledger):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        import pandas as pd

        yield pd.DataFrame({"k": [key[0]], "totel": [1]})  # a misspelt column


class _Hasty(Ledger):
    def init(self, handle: Any) -> None:
        super().init(handle)
        handle.registerTimer(5)  # before there is a key


def _line(mark: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, start=1) if line.endswith(f"# {mark}")]
    return f"{__file__}:{number} in "


@pytest.mark.parametrize(
    ("processor", "said"),
    [
        (_Late, ["SB1015", "State 'acc' was used outside", _line("a look at no key") + "close"]),
        (_Timeless, ["SB1013", "timeMode=", _line("in no time mode") + "handleInputRows"]),
        (_Scalars, ["SB1014", "returned what is no iterable of rows ('int'"]),
    ],
)
def test_a_mistake_in_a_processor_is_told_with_its_line_and_leaves_no_trace(
    world: World, processor: type[Ledger], said: list[str]
) -> None:
    world.input.add_batches(1)
    world.run_ledger()
    world.input.add_batches(1)
    backend = world.backend()
    text = world.fail(backend, world.ledger(backend, processor=processor()))
    for one in said:
        assert one in text
    world.check(world.run_ledger())


@pytest.mark.parametrize(
    ("flavour", "processor", "mark"),
    [
        ("rows", _Misspelt, "a misspelt field"),
        ("pandas", _MisspeltFrames, "a misspelt column"),
    ],
)
def test_an_output_field_that_the_schema_does_not_have_is_told_with_its_line_and_key(
    world: World, flavour: str, processor: type[Ledger], mark: str
) -> None:
    world.input.add_keys("only")
    backend = world.backend(parallelism=1)
    frame = _frame(
        backend,
        world.input.stream(world.spark),
        processor(),
        output_schema="k string, total bigint",
        flavour=flavour,
    )
    text = world.fail(backend, frame)
    assert "SB1005" in text
    assert "'totel'" in text
    assert "struct<k:string,total:bigint>" in text
    assert f"for key ('only',) at {_line(mark)}handleInputRows" in text
    assert flavour == "pandas" or "did you mean 'total'?" in text
    assert checkpoints(backend) == []


def test_a_timer_in_init_is_refused_at_the_call_with_its_line(old: World, df: DataFrame) -> None:
    for given in ({}, {"time_mode": "processing"}):
        with pytest.raises(UnsupportedQueryError) as caught:
            _frame(old.backend(), df, _Hasty(), **given)
        assert _line("before there is a key") + "init" in str(caught.value)
