"""Functions of applyInPandasWithState do what they do in Spark's own engine."""

from __future__ import annotations

import datetime
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
from pyspark.cloudpickle import register_pickle_by_value
from pyspark.sql.streaming.state import GroupStateTimeout

from statebackend.errors import SchemaError, SettingError, UnsupportedQueryError
from tests.spark.local.conformance import PROVIDER, Both, Case
from tests.spark.local.conforming import TOLD, TYPED, frame_shown, shown
from tests.spark.local.test_conformance_of_time import EVENTS, event
from tests.spark.local.world import durable_state, setting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql.streaming.query import StreamingQuery

    from tests.spark.local.world import Rows, World

register_pickle_by_value(sys.modules[__name__])  # workers need not find this module

DAY_MS = 86_400_000


@dataclass
class FunctionCase(Case):
    """A function, and how it is asked for. ``processor`` is not looked at."""

    function: Any = None
    state: str = "n bigint, plan string"
    timeout: str = GroupStateTimeout.NoTimeout
    output_mode: str = "Update"


class BothFunctions(Both):
    """As :class:`Both`, for functions."""

    parallelism = 2

    def _start_spark(self, case: Any) -> StreamingQuery:
        assert self.input is not None
        frame = self.input.stream(self.spark)
        if case.delay is not None:
            frame = frame.withWatermark("at", case.delay)
        result = frame.groupBy(*case.keys).applyInPandasWithState(
            case.function, case.output, case.state, case.output_mode, case.timeout
        )
        location = self.world.root / "spark-checkpoint"
        with (
            setting(self.spark, "spark.sql.streaming.stateStore.providerClass", PROVIDER),
            setting(self.spark, "spark.sql.shuffle.partitions", "2"),
        ):
            return self._writer(result, self.sparks, location, case).start()  # type: ignore[no-any-return]

    def _start_ours(self, case: Any) -> StreamingQuery:
        assert self.input is not None
        self.backend = self.world.backend(parallelism=self.parallelism)
        frame = self.input.stream(self.spark)
        if case.delay is not None:
            frame = frame.withWatermark("at", case.delay)
        result = self.backend.apply_in_pandas_with_state(
            frame.groupBy(*case.keys),
            case.function,
            case.output,
            case.state,
            case.output_mode,
            case.timeout,
            uid="both",
        )
        return self.backend.start(self._writer(result, self.ours, self.world.location, case))  # type: ignore[no-any-return]

    def agree_in_order_of_keys(self) -> None:
        """Every key gave the same rows in one order, in whichever batches."""

        def by_key(batches: Any) -> dict[int, list[Any]]:
            rows = [row for _, some in sorted(batches.items()) for row in some]
            return {0: sorted(rows, key=lambda row: row[0])}

        assert by_key(self.sparks.batches) == by_key(self.ours.batches)

    def _writer(self, frame: Any, sink: Any, location: Any, case: Any) -> Any:
        return super()._writer(frame, sink, location, case).outputMode(case.output_mode)


@pytest.fixture
def both(world: World) -> BothFunctions:
    return BothFunctions(world)


def told(key: Any, state: Any, what: list[Any]) -> pd.DataFrame:
    n = (state.getOption or (0, ""))[0]
    return pd.DataFrame({"k": [str(key[0])], "seq": [n], "what": [" | ".join(map(str, what))]})


def seen(state: Any) -> str:
    return f"{state.exists} {state.getOption} {state.hasTimedOut} {state}"


def asked(call: Any) -> str:
    try:
        return shown(call())
    except Exception as error:
        return f"{type(error).__name__} {error}"


# --- what it is shown ---------------------------------------------------------------------------


def counted(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
    rows = 0
    for frame in frames:
        rows += len(frame)
    before = state.getOption
    n = (before or (0, ""))[0] + rows
    state.update((n, f"{rows} more"))
    yield told(key, state, [shown(key), before, seen(state)])


@pytest.mark.parametrize("mode", ["Update", pytest.param("append", marks=pytest.mark.full)])
def test_a_count_goes_on_after_a_restart_and_with_other_subtasks(
    both: BothFunctions, mode: str
) -> None:
    case = FunctionCase("k string, id bigint", None, function=counted, output_mode=mode)
    batches = [[{"k": f"k{(b + i) % 5}", "id": i} for i in range(9)] for b in range(3)]
    both.run(case, batches)
    both.run(case, batches[:2])
    both.parallelism = 3
    both.run(case, batches[1:])
    both.agree()
    state = durable_state(both.backend, "both")
    assert set(state) == {"state"}
    assert sum(n for n, _ in state["state"].values()) == 63


def typed(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
    what: list[Any] = [shown(key), [type(value).__name__ for value in key]]
    what += [frame_shown(frame) for frame in frames]
    yield told(key, state, what)


FULL: dict[str, Any] = {
    "k": "a", "seq": 1, "i": 5, "s": {"x": 1, "deep": {"y": "z"}}, "l": [1, 2], "ls": [{"q": 1}],
    "m": {"a": 1}, "t": "2026-01-01T12:00:00.123456Z", "n": "2026-07-01T00:00:00",
    "d": "2026-02-03", "c": 1.25, "b": "eA==", "f": 1.5, "o": -0.5, "z": True, "y": 7,
}  # fmt: skip


@pytest.mark.parametrize("keys", [("k",), ("y", "i", "k", "t", "z", "f", "o", "d", "c", "b")])
def test_frames_and_keys_are_as_in_spark(both: BothFunctions, keys: tuple[str, ...]) -> None:
    case = FunctionCase(TYPED, None, function=typed, keys=keys)
    rows = [FULL, FULL | {"k": "b", "i": None, "z": None, "f": None, "s": None, "t": None}]
    rows.append({"k": "c", "i": 1, "y": 2} | dict.fromkeys(("l", "m", "ls")))
    with setting(both.spark, "spark.sql.session.timeZone", "Asia/Tokyo"):
        both.run(case, [rows, [FULL, FULL | {"seq": 2, "i": 6}]])
    both.agree()


STATE = (
    "n bigint, plan string, t timestamp, d date, c decimal(10, 2), b binary, "
    "s struct<x: int, y: string>, f float, z boolean, u timestamp_ntz"
)


def stored(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
    import decimal

    import numpy as np
    from pyspark.sql import Row

    before = state.getOption
    for _ in frames:
        pass
    n = 1 if before is None else before[0] + 1
    if n == 2:
        state.update((np.int64(n), *[None] * 9))
    else:
        state.update(
            (
                np.int32(n), "p", pd.Timestamp("2026-01-02 03:04:05.678901"),
                datetime.date(2026, 1, 2), decimal.Decimal("1.25"), b"xy",
                Row(x=1, y="s"), 0.5, np.bool_(True), datetime.datetime(2026, 1, 2, 3, 4),
            )
        )  # fmt: skip
    yield told(key, state, [shown(before)])


def test_state_of_every_type_is_as_in_spark(both: BothFunctions) -> None:
    case = FunctionCase("k string, id bigint", None, function=stored, state=STATE)
    batches: list[Rows] = [[{"k": "a", "id": 1}]] * 4
    with setting(both.spark, "spark.sql.session.timeZone", "Asia/Tokyo"):
        both.run(case, batches)
    both.agree()


# --- what it does -------------------------------------------------------------------------------


def mistaken(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
    calls: list[Any] = [
        lambda: state.get,
        lambda: state.update(None),
        lambda: state.setTimeoutDuration("1 minute"),
        lambda: state.setTimeoutDuration(0),
        lambda: state.setTimeoutDuration(5000),
        lambda: state.setTimeoutTimestamp(0),
        lambda: state.setTimeoutTimestamp(1),
        lambda: state.setTimeoutTimestamp(datetime.datetime(1960, 1, 1)),
        lambda: state.setTimeoutTimestamp(datetime.datetime(2960, 1, 1)),
        lambda: state.getCurrentWatermarkMs(),
        lambda: state.getCurrentProcessingTimeMs() > 1_600_000_000_000,
        lambda: state.oldTimeoutTimestamp,
        lambda: [state.update((1, "x")), state.get, state.remove(), state.exists],
        lambda: state.get,
        lambda: [state.update([2, None]), state.get, str(state)],
    ]
    yield told(key, state, [asked(call) for call in calls])


@pytest.mark.parametrize("delay", [None, "0 seconds"])
@pytest.mark.parametrize("timeout", ["NoTimeout", "ProcessingTimeTimeout", "EventTimeTimeout"])
def test_mistakes_are_told_as_in_spark(
    both: BothFunctions, timeout: str, delay: str | None
) -> None:
    if timeout == "EventTimeTimeout" and delay is None:
        pytest.skip("refused by both")
    processing = timeout == "ProcessingTimeTimeout"
    case = FunctionCase(
        EVENTS, None, function=mistaken, timeout=timeout, delay=delay, rows_out=4,
        mode="processing" if processing else "none",
    )  # fmt: skip
    both.run(case, [[event("a", 1, 5000)], [event("a", 2, 9000), event("b", 3, 1000)],
                    [event("c", 4, 9500)]])  # fmt: skip
    both.agree_but_for_empty_batches()


def held(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
    """Keeps what to do when it times out, and the duration until then."""
    import numpy as np

    before, timed_out = state.getOption, state.hasTimedOut
    ids = [int(n) for frame in frames for n in frame["id"]]
    what = f"{timed_out} {before} {ids}"
    if not timed_out:
        n = (before or (0, ""))[0] + sum(ids)
        if 7 not in ids:
            state.update((np.int64(n), "plan"))
        # The wall clock moves between batches: what is due at once is due in the next one.
        if max(ids) < 5:
            state.setTimeoutDuration(1 if min(ids) < 3 else DAY_MS)
        yield told(key, state, [what])
    elif before is not None and before[1] == "plan":
        state.update((before[0] + 100, "again"))
        state.setTimeoutDuration(1)
        yield told(key, state, [what])
    else:
        state.remove()
        yield told(key, state, [what, state.exists])


def test_timeouts_in_processing_time_are_as_in_spark(both: BothFunctions) -> None:
    case = FunctionCase(
        "k string, id bigint", None, function=held, mode="processing", output_mode="Append",
        timeout="ProcessingTimeTimeout",
    )  # fmt: skip
    case.rows_out = 9
    # a and b time out twice; c has a timeout that is far, d's is cleared, e is never written.
    both.run(case, [[{"k": "a", "id": 1}, {"k": "b", "id": 2}, {"k": "c", "id": 3},
                     {"k": "d", "id": 4}, {"k": "d", "id": 6}, {"k": "e", "id": 7}]])  # fmt: skip
    both.parallelism = 3
    case.rows_out += 4
    both.run(case, [[{"k": "a", "id": 2}, {"k": "c", "id": 9}]])
    both.agree_in_order_of_keys()
    assert set(durable_state(both.backend, "both")["state"]) == {("c",), ("d",)}


def timed(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
    """What a row says (+timeout, =value, -: remove, .: nothing); state keeps what to do later."""
    what = [seen(state), state.getCurrentWatermarkMs()]
    ops, ids = [], []
    for frame in frames:
        what.append(
            f"{type(frames).__name__ if state.hasTimedOut else ''} {frame_shown(frame)[:0]}"
        )
        what.append(f"{list(frame.columns)} {len(frame)}")
        ops += " ".join(frame["ops"]).split()
        ids += list(frame["id"])
    if state.hasTimedOut:
        what.append(f"{frame.dtypes.tolist()} {frame.index}")
        ops = ((state.getOption or (0, ""))[1] or "").split("/")
        ops = [op.replace("_", "=") for op in ops if op]
    for op in ops:
        if op[0] == "+":
            what.append(asked(lambda op=op: state.setTimeoutTimestamp(int(op[1:]))))
        if op[0] == "=":
            state.update((len(ids), op[1:]))
        if op[0] == "-":
            state.remove()
    yield told(key, state, [*what, sorted(map(int, ids)), seen(state)])


TIMED: list[Rows] = [
    # Due when the watermark has passed them.
    [
        event("same", 1, 500, "=x +1000"),
        event("noop", 2, 600, "=1 +1000"),
        event("again", 3, 600, "=+5000 +2999"),
        event("gone", 4, 600, "=- +1000"),
        event("less", 5, 600, "+1000"),
        event("kept", 6, 600, "=2 +3500"),
        event("removed", 7, 600, "=2 - +1000"),
        event("set", 8, 600, "=_new/+4000 +1000"),
        event("both", 9, 600, "=later/+9000 +999"),
    ],
    # 600. What is written without a timeout has none, what is not written keeps it.
    [event("kept", 10, 1000, ""), event("same", 11, 1000, "=y"), event("z", 12, 3000, "+500")],
    # 3000: at 3000 a timeout of 2999 is over, one of 3000 is not.
    [event("late", 13, 3000, "=x"), event("late", 14, 600), event("both", 15, 3500, "+9000")],
    [event("kept", 16, 3600, ""), event("w", 17, 3600, "=x +3600")],
    [event("z", 18, 10_000, "")],
    [event("z", 19, 10_001, "")],
]


@pytest.mark.parametrize("mode", ["update", "Append"])
@pytest.mark.parametrize("again", [False, True])
def test_timeouts_in_event_time_are_as_in_spark(
    both: BothFunctions, mode: str, again: bool
) -> None:
    case = FunctionCase(
        EVENTS, None, function=timed, delay="0 seconds", timeout="EventTimeTimeout",
        output_mode=mode,
    )  # fmt: skip
    if again:
        both.run(case, TIMED[:2])
        both.parallelism = 3
        both.run(case, TIMED[2:])
    else:
        both.run(case, TIMED)
    both.agree_but_for_empty_batches()
    assert both.dropped_by_spark
    late = sum(epoch.late_rows for epoch in both.backend.progress().epochs)
    assert again or late == both.dropped_by_spark


# --- what is refused, and what differs ----------------------------------------------------------


def untold(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
    yield pd.DataFrame({"k": [key[0]]})


def test_what_cannot_run_is_refused_where_it_is_made(world: World) -> None:
    backend, frame = world.backend(), world.input.stream(world.spark)
    good: dict[str, Any] = {
        "func": untold, "outputStructType": "k string", "stateStructType": "n bigint",
        "outputMode": "Update", "timeoutConf": "NoTimeout", "uid": "f",
    }  # fmt: skip

    def refused(grouped: Any, kind: type[Exception], text: str, **other: Any) -> None:
        with pytest.raises(kind, match=text):
            backend.apply_in_pandas_with_state(grouped, **(good | other))

    by_key = frame.groupBy("k")
    refused(by_key, SettingError, "output mode", outputMode="Complete")
    refused(by_key, SettingError, "timeout", timeoutConf="notimeout")
    refused(by_key, SettingError, "function", func=3)
    refused(by_key, UnsupportedQueryError, "no watermark", timeoutConf="EventTimeTimeout")
    refused(by_key, SchemaError, "state of operator", stateStructType="n nothing")
    refused(by_key, SettingError, "grouped already", keys="k")
    refused(frame, SettingError, "without keys=")
    refused("k", SettingError, "given a str")
    refused(frame.cube("k"), SchemaError, r"not grouped by groupBy\(\)")
    refused(frame.groupBy(), SchemaError, "grouped by nothing")
    refused(world.spark.range(3).groupBy("id"), UnsupportedQueryError, "batch query")
    assert backend.apply_in_pandas_with_state(by_key, **good).isStreaming
    made = backend.apply_in_pandas_with_state(frame, **(good | {"keys": "k", "uid": "g"}))
    assert made.columns == ["k"]


@pytest.mark.parametrize("what", ["raises", "column", "frame", "none", "state"])
def test_what_goes_wrong_in_a_function_names_the_key_and_the_function(
    world: World, what: str
) -> None:
    def wrong(key: Any, frames: Any, state: Any) -> Any:
        if what == "raises":
            raise ValueError("no such thing")
        if what == "state":
            state.update(("text",))
        return {
            "column": [pd.DataFrame({"other": [1]})],
            "frame": pd.DataFrame({"k": ["a"]}),
            "state": iter([]),
        }.get(what)

    world.input.add_keys("a")
    backend = world.backend()
    frame = backend.apply_in_pandas_with_state(
        world.input.stream(world.spark).groupBy("k"), wrong, "k string", "n bigint", "append",
        "NoTimeout", uid="f",
    )  # fmt: skip
    text = world.fail(backend, frame)
    assert {
        "raises": "raised ValueError: no such thing for key ('a',)",
        "column": "without the column 'k'",
        "frame": "where an iterator of pandas DataFrames was expected",
        "none": "no iterable of rows",
        "state": "updated its state with what does not fit: Field 'n' is bigint",
    }[what] in text, text
    assert "for key ('a',)" in text or what == "frame"
    assert __file__ in text or what == "none"


def everything(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
    before = state.getOption
    seen_before = shown(before)
    items, names = before or ([], {})
    ids = [int(n) for frame in frames for n in frame["id"]]
    items += ids
    state.update((items, {**names, str(len(items)): ids[0]}))
    items.append(99)  # still within the call
    yield pd.DataFrame({"k": [key[0]], "seq": [len(items)], "what": [seen_before]})


def test_lists_and_maps_are_kept_which_sparks_own_state_has_no_room_for(world: World) -> None:
    for number in (1, 2, 3):
        world.input.add([{"k": "a", "id": number}])
    backend = world.backend()
    frame = backend.apply_in_pandas_with_state(
        world.input.stream(world.spark).groupBy("k"), everything, TOLD,
        "items array<int>, names map<string, int>", "append", "NoTimeout", uid="f",
    )  # fmt: skip
    world.run(backend, frame)
    assert [row["what"] for row in world.sink.rows()] == [
        "None", "tuple(list(1, 99), {'1': 1})", "tuple(list(1, 99, 2, 99), {'1': 1, '3': 2})",
    ]  # fmt: skip
