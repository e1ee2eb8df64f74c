"""Processors that are run by Spark's own engine and by ours, over the same input.

Each tells in its output all it saw: values, their types and their order. They travel to workers by
value, so none needs this file.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOLD = "k string, seq bigint, what string"


def shown(value: Any) -> str:
    """A value with its type, the same for equal values."""
    if isinstance(value, Row) and hasattr(value, "__fields__"):
        return f"Row({', '.join(f'{n}={shown(getattr(value, n))}' for n in value.__fields__)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {shown(v)}" for k, v in sorted(value.items())) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(shown, value))})"
    if isinstance(value, datetime.datetime):
        return f"{type(value).__name__} {value.isoformat()}"
    if hasattr(value, "dtype") and hasattr(value, "tolist") and getattr(value, "shape", ()):
        return f"array {value.dtype} {value.tolist()}"
    return repr(value)


def frame_shown(frame: Any) -> str:
    """A pandas frame: its labels, types, index and values."""
    types = [str(dtype) for dtype in frame.dtypes]
    values = {name: list(frame[name]) for name in frame.columns}
    return f"{list(frame.columns)} {types} {list(frame.index)} {shown(values)}"


# --- state, row by row -------------------------------------------------------------------------


def _read_while_appending(states: Any, n: int) -> list[Any]:
    rows = states.items.get()
    first = next(rows, None)
    states.items.appendValue((n,))
    return [first, *rows]


def _read_twice(states: Any, n: int) -> list[Any]:
    rows = states.items.get()
    return [list(rows), list(rows)]


def _put_numpy(states: Any, n: int) -> None:
    import numpy as np

    states.value.update((np.int64(n), "numpy"))
    states.items.put([(np.int32(n),)])


STATE_OPS: dict[str, Callable[[Any, int], Any]] = {
    "value.get": lambda s, n: s.value.get(),
    "value.exists": lambda s, n: s.value.exists(),
    "value.update": lambda s, n: s.value.update((n, f"text {n}")),
    "value.update Row": lambda s, n: s.value.update(Row(n=n, text="by position")),
    "value.update list": lambda s, n: s.value.update([n, None]),
    "value.update nulls": lambda s, n: s.value.update((None, None)),
    "value.clear": lambda s, n: s.value.clear(),
    "list.get": lambda s, n: list(s.items.get()),
    "list.exists": lambda s, n: s.items.exists(),
    "list.appendValue": lambda s, n: s.items.appendValue((n,)),
    "list.appendValue null": lambda s, n: s.items.appendValue((None,)),
    "list.appendList": lambda s, n: s.items.appendList([(n,), (n + 1,)]),
    "list.put": lambda s, n: s.items.put([(n,), (-n,), (n,)]),
    "list.put generator": lambda s, n: s.items.put((i,) for i in range(n % 3 + 1)),
    "list.clear": lambda s, n: s.items.clear(),
    "list.get twice": _read_twice,
    "list.get while appending": _read_while_appending,
    "numpy": _put_numpy,
    "map.getValue": lambda s, n: s.map.getValue(("a", 1)),
    "map.containsKey": lambda s, n: [s.map.containsKey(("a", 1)), s.map.containsKey(("z", n))],
    "map.containsKey Row": lambda s, n: s.map.containsKey(Row(name="a", half=1)),
    "map.updateValue": lambda s, n: [
        s.map.updateValue(("a", n % 2), (n, (n, "inner"))),
        s.map.updateValue((None, 1), (None, None)),
    ],
    "map.keys": lambda s, n: sorted(s.map.keys(), key=repr),
    "map.values": lambda s, n: sorted(s.map.values(), key=repr),
    "map.iterator": lambda s, n: sorted(s.map.iterator(), key=repr),
    "map.removeKey": lambda s, n: [s.map.removeKey(("a", 1)), s.map.removeKey(("none", 9))],
    "map.exists": lambda s, n: s.map.exists(),
    "map.clear": lambda s, n: s.map.clear(),
}


class EveryMethod(StatefulProcessor):
    """Does what each row says (``op``, ``n``) and tells what came of it."""

    def init(self, handle: Any) -> None:
        self.value = handle.getValueState("value", "n bigint, text string")
        self.items = handle.getListState("items", "n int")
        inner = "n int, inner struct<x: int, y: string>"
        self.map = handle.getMapState("map", "name string, half int", inner)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in rows:
            result = STATE_OPS[row.op](self, row.n)
            yield Row(k=key[0], seq=row.seq, what=f"{row.op}: {shown(result)}")

    def close(self) -> None:
        pass


# --- types --------------------------------------------------------------------------------------

TYPED = (
    "k string, seq bigint, i int, s struct<x: int, deep: struct<y: string>>, l array<int>, "
    "ls array<struct<q: int>>, m map<string, int>, t timestamp, n timestamp_ntz, d date, "
    "c decimal(10, 2), b binary, f float, o double, z boolean, y tinyint"
)


class Types(StatefulProcessor):
    """Tells what each row is made of, and what comes back from state of the same types."""

    def init(self, handle: Any) -> None:
        self.last = handle.getValueState("last", TYPED)
        self.all = handle.getListState("all", TYPED)
        nested = "s struct<x: int, deep: struct<y: string>>, t timestamp"
        self.by = handle.getMapState("by", "t timestamp, c decimal(10, 2), k string", nested)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        times = timerValues.getCurrentProcessingTimeInMs(), timerValues.getCurrentWatermarkInMs()
        for row in rows:
            yield Row(k=key[0], seq=row.seq, what=f"{shown(key)} {shown(row)} {times}")
            kept = row.asDict() | {"m": None if row.m is None else dict(row.m)}
            self.last.update(tuple(kept.values()))
            self.all.appendValue(tuple(kept.values()))
            self.by.updateValue((row.t, row.c, row.k), (row.s, row.t))
            found = self.by.getValue((row.t, row.c, row.k))
            yield Row(k=key[0], seq=row.seq, what=f"value {shown(self.last.get())}")
            yield Row(k=key[0], seq=row.seq, what=f"list {shown(list(self.all.get()))}")
            yield Row(k=key[0], seq=row.seq, what=f"map {shown(list(self.by.iterator()))}")
            yield Row(k=key[0], seq=row.seq, what=f"in map {shown(found)}")

    def close(self) -> None:
        pass


class TypesInFrames(StatefulProcessor):
    """Tells what each frame is made of."""

    def init(self, handle: Any) -> None:
        self.last = handle.getValueState("last", "t timestamp, i int, s string")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        import pandas as pd

        for frame in rows:
            before = self.last.get()
            last = frame.iloc[-1]
            number = None if pd.isna(last["i"]) else last["i"]
            moment = None if pd.isna(last["t"]) else last["t"]
            self.last.update((moment, number, last["k"]))
            told = f"{shown(key)} {frame_shown(frame)} {shown(before)} {shown(self.last.get())}"
            yield pd.DataFrame({"seq": [int(frame["seq"].iloc[0])], "what": [told], "k": [key[0]]})

    def close(self) -> None:
        pass


class Keys(StatefulProcessor):
    """Counts the rows of each key, and tells key and count."""

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        n = (self.count.get() or (0,))[0] + sum(1 for _ in rows)
        self.count.update((n,))
        yield Row(k=shown(key), seq=n, what="")

    def close(self) -> None:
        pass


class KeysInFrames(Keys):
    """The same for frames."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        import pandas as pd

        whole = [row for frame in rows for row in frame.itertuples()]
        for row in super().handleInputRows(key, iter(whole), timerValues):
            yield pd.DataFrame([row.asDict()])


# --- what may be returned -------------------------------------------------------------------------

RETURNED = (
    "k string, i int, o double, s struct<x: int, y: string>, m map<string, int>, l array<int>, "
    "t timestamp, n timestamp_ntz"
)
_NOON = datetime.datetime(2026, 1, 1, 12)
_TOKYO = datetime.timezone(datetime.timedelta(hours=9))


def _numpy_row(k: str) -> Row:
    import numpy as np
    import pandas as pd

    moment = pd.Timestamp(_NOON)
    return Row(k=np.str_(k), i=np.int64(8), o=np.float32(0.5), l=np.array([1, 2]), n=moment)


class Returns(StatefulProcessor):
    """Returns rows in every way that Spark takes them."""

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        k = key[0]
        if k == "list":
            return [Row(k=k, i=1), Row(k=k, i=2)]
        if k == "nothing":
            return []
        if k == "other order":
            return iter([Row(s=Row(y="y", x=1), i=3, k=k)])
        if k == "whole":
            return iter([Row(k=k, i=5.0, o=7)])
        if k == "nested":
            return iter([Row(k=k, s={"y": "of a dict"}, m={"a": 1}, l=[1, None]), Row(k=k, l=(2,))])
        if k == "pairs":
            return iter([Row(k=k, m=[("q", 1)])])
        if k == "made":
            return iter([Row("o", "k")(0.25, k), Row("k")(k)])
        if k == "numpy":
            return iter([_numpy_row(k)])
        if k == "times":
            return iter([Row(k=k, t=_NOON, n=_NOON), Row(k=k, t=_NOON.replace(tzinfo=_TOKYO))])
        return iter([Row(k=k)])

    def close(self) -> None:
        pass


class ReturnsFrames(StatefulProcessor):
    """The same for frames."""

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        import pandas as pd

        k = key[0]
        if k == "list":
            return [pd.DataFrame({"k": [k], "i": [1], "o": [0.5], "t": [pd.Timestamp(_NOON)]})] * 2
        if k == "nothing":
            return iter([])
        if k == "other order":
            return iter([pd.DataFrame({"t": [None], "o": [1], "k": [k], "i": [3.0]})])
        if k == "many":
            return (
                pd.DataFrame({"k": [k], "i": [len(f)], "o": [f.index[-1]], "t": [None]})
                for f in rows
            )
        if k == "extensions":
            i, o = pd.array([None, 7], dtype="Int64"), pd.Series([1, 2], dtype="int8")
            t = pd.Series([pd.Timestamp(_NOON, tz=_TOKYO)] * 2)
            k = pd.Series([k, None], dtype="string")
            return iter([pd.DataFrame({"k": k, "i": i, "o": o, "t": t}, index=[5, 3])])
        if k == "names":
            told = shown([list(frame.columns) for frame in rows])
            return iter([pd.DataFrame({"k": [told], "i": [0], "o": [None], "t": [None]})])
        if k == "positions":
            return iter([pd.DataFrame([[k, 1, 2.5, pd.Timestamp(_NOON, tz=_TOKYO)]])])
        nothing = float("nan")
        return iter([pd.DataFrame({"k": [k], "i": [nothing], "o": [None], "t": [None]})])

    def close(self) -> None:
        pass


# --- initial state, dropped state -----------------------------------------------------------------


class Initial(StatefulProcessor):
    """Keeps what it is given at first, and tells it with the key's first rows."""

    def init(self, handle: Any) -> None:
        self.given = handle.getListState("given", "what string")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> Any:
        told = initialState if isinstance(initialState, Row) else None
        told = frame_shown(initialState) if told is None else shown(told)
        times = timerValues.getCurrentProcessingTimeInMs(), timerValues.getCurrentWatermarkInMs()
        self.given.appendValue((f"{shown(key)} {told} {times}",))
        return [Row(k="ignored", seq=0, what="")]

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        n = sum(1 for _ in rows)
        yield Row(k=key[0], seq=n, what=shown(sorted(self.given.get())))

    def close(self) -> None:
        pass


class InitialInFrames(Initial):
    """The same for frames."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        import pandas as pd

        n = sum(len(frame) for frame in rows)
        told = [shown(sorted(self.given.get()))]
        yield pd.DataFrame({"k": [key[0]], "seq": [n], "what": told})


class Versions(StatefulProcessor):
    """Counts in the states that it is told to have, after deleting those it is told to delete."""

    def __init__(self, delete: str, have: str) -> None:
        self.delete, self.have = delete.split(), have.split()

    def init(self, handle: Any) -> None:
        for name in self.delete:
            handle.deleteIfExists(name)
        self.states = {name: handle.getValueState(name, "n bigint") for name in self.have}

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        n = sum(1 for _ in rows)
        told = {}
        for name, state in self.states.items():
            told[name] = (state.get() or (0,))[0] + n
            state.update((told[name],))
        yield Row(k=key[0], seq=n, what=shown(told))

    def close(self) -> None:
        pass
