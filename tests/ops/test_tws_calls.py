"""How Spark's processors are called in an epoch: with which values, in which form."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as T
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from statebackend.errors import ProcessorError, ValueMismatchError
from statebackend.operators import per_key_loop as operator_module
from statebackend.operators.declared_states import EpochTimes, StateDeclaration
from statebackend.operators.epoch_phases import StatefulEpoch
from statebackend.operators.input.group_by_key import Groups, group_rows
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.state.table import MemoryBase, StateTable

INPUT = T.StructType(
    [
        T.StructField("at", T.TimestampType()),
        T.StructField("name", T.StringType()),
        T.StructField("n", T.LongType()),
    ]
)
OUTPUT = T.StructType([T.StructField("name", T.StringType()), T.StructField("n", T.LongType())])
NUMBER = T.StructType([T.StructField("n", T.LongType())])
STATES = {
    "value": StateDeclaration(name="value", kind="value", value_schema=NUMBER.json()),
    "map": StateDeclaration(
        name="map", kind="map", value_schema=NUMBER.json(), key_schema=NUMBER.json()
    ),
}
MOMENT = datetime(2020, 11, 1, 6, 30, tzinfo=UTC)
NEW_YORK = "America/New_York"


class Processor(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", NUMBER)
        self.map = handle.getMapState("map", NUMBER, NUMBER)
        self.fired: list[Any] = []

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        yield from ()

    def close(self) -> None:
        pass


def plan_of(*, flavour: str = "rows") -> OperatorPlan:
    return OperatorPlan(
        uid="totals",
        flavour=flavour,
        input_schema=INPUT,
        key_positions=(0, 1),
        output_schema=OUTPUT,
        states=STATES,
        time_mode="processing",
        timezone="America/New_York",
    )


def run(processor: StatefulProcessor, names: list[str], table: StateTable | None = None) -> Any:
    """One epoch at 1000 ms, a row for each name; its output."""
    plan = plan_of()
    epoch = StatefulEpoch(
        plan,
        processor,
        table=table or StateTable(MemoryBase()),
        state_ids={"value": 1, "map": 2},
        times=EpochTimes(processing_time_ms=1000),
        key_groups=range(4),
    )
    rows = pa.table(
        [
            pa.array([MOMENT] * len(names), pa.timestamp("us", "UTC")),
            pa.array(names, pa.string()),
            pa.array(range(len(names)), pa.int64()),
        ],
        names=INPUT.names,
    )
    encoded = plan.key_codec.encode_arrow([c.combine_chunks() for c in rows.columns[:2]])
    groups: Groups = group_rows(rows, encoded, np.zeros(len(names), np.uint16))
    batches = list(epoch.run(iter([groups])))
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def test_rows_and_keys_show_timestamps_in_the_sessions_zone() -> None:
    class Sees(Processor):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            (row,) = rows
            assert type(key) is tuple
            assert key == (row.at, "a") == row[:2]
            assert key[0].timestamp() == MOMENT.timestamp()
            # By its name: before 25, pyarrow shows zones of pytz's.
            assert str(key[0].tzinfo) == str(row.at.tzinfo) == NEW_YORK
            assert row.at.utcoffset() == timedelta(hours=-5)  # the second of two half past ones
            yield T.Row(n=1, name="ok")

    assert run(Sees(), ["a"]) == [("ok", 1)]


def test_a_timer_is_called_by_keyword_with_a_row_as_its_key() -> None:
    class Fires(Processor):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            self.handle.registerTimer(900)
            yield from ()

        def handleExpiredTimer(
            self, *, expiredTimerInfo: Any, timerValues: Any, key: Any
        ) -> Iterator[Any]:
            assert isinstance(key, T.Row)
            assert key == (key.at, key.name)
            assert key.at.timestamp() == MOMENT.timestamp()
            assert timerValues.getCurrentProcessingTimeInMs() == 1000
            yield T.Row(name=key.name, n=expiredTimerInfo.getExpiryTimeInMs())

    assert run(Fires(), ["b", "a"]) == [("a", 900), ("b", 900)]


@pytest.mark.parametrize("chunk_keys", [1, 3, 1000])
def test_timers_of_one_key_see_what_the_one_before_them_did(
    monkeypatch: pytest.MonkeyPatch, chunk_keys: int
) -> None:
    monkeypatch.setattr(operator_module, "_CHUNK_KEYS", chunk_keys)

    class Counts(Processor):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            for at_ms in (300, 100, 200, 400, 5000):
                self.handle.registerTimer(at_ms)
            yield from ()

        def handleExpiredTimer(
            self, key: Any, timerValues: Any, expiredTimerInfo: Any
        ) -> Iterator[Any]:
            at_ms = expiredTimerInfo.getExpiryTimeInMs()
            assert sorted(self.handle.listTimers())[0] == at_ms
            before = self.value.get()
            self.value.update(((before[0] if before else 0) + 1,))
            if at_ms == 200:
                self.handle.deleteTimer(300)
            yield key.name, at_ms * 10 + self.value.get()[0]

    table = StateTable(MemoryBase())
    found = run(Counts(), ["a", "b"], table)
    assert found == [
        ("a", 1001), ("b", 1001), ("a", 2002), ("b", 2002), ("a", 4003), ("b", 4003),
    ]  # fmt: skip
    keys = [key for key, _ in table.snapshot() if key[2:4] == b"\xff\xff"]
    assert len(keys) == 2  # those of 5000


def test_only_a_maps_get_value_gives_names_as_in_spark() -> None:
    class Reads(Processor):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            assert self.map.getValue((1,)) is None
            self.map.updateValue((1,), (2,))
            found = self.map.getValue((1,))
            assert isinstance(found, T.Row)
            assert (found.n, found["n"], found) == (2, 2, (2,))
            self.value.update(found)
            plain = [self.value.get(), *self.map.keys(), *self.map.values(), *self.map.iterator()]
            assert plain == [(2,), (1,), (2,), ((1,), (2,))]
            assert {type(one) for one in plain} == {tuple}
            yield T.Row(name="ok", n=1)

    assert run(Reads(), ["a"]) == [("ok", 1)]


def test_an_error_in_a_timer_names_its_key() -> None:
    class Fails(Processor):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            self.handle.registerTimer(1)
            yield from ()

        def handleExpiredTimer(
            self, key: Any, timerValues: Any, expiredTimerInfo: Any
        ) -> Iterator[Any]:
            raise RuntimeError(f"not for {key.name}")

    with pytest.raises(ProcessorError, match=r"not for a.*Row.*name='a'"):
        run(Fails(), ["a"])


def test_a_bad_value_is_refused_at_the_line_that_writes_it() -> None:
    class Writes(Processor):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            self.value.update(("x",))
            yield from ()

    with pytest.raises(ValueMismatchError, match=r"test_tws_calls\.py:\d+ in handleInputRows"):
        run(Writes(), ["a"])
