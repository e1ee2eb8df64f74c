"""State is what a plain dict would be: after a random history, and written as tables."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as T

import statebackend
from statebackend import TTL, OperatorState
from statebackend.api.processors import KeyedProcessor
from statebackend.schema.keys.key_codec import KeyCodec
from tests.schema.strategies import same, tables, to_arrow, types
from tests.support.inprocess import STAMP_MS, InProcessJob

FAR_MS = STAMP_MS + 10**9
STATES = ("value", "entries", "elements", "most")


class Told(KeyedProcessor):
    """Does to the state of a key what each row's number says; `Model` does the same to dicts."""

    def open(self, ctx: Any) -> None:
        self.value = ctx.value_state("value", "n bigint, text string")
        self.entries = ctx.map_state("entries", "word string", "n bigint")
        self.elements = ctx.list_state("elements", "n bigint")
        self.most = ctx.reducing_state("most", "n bigint", max)

    def process(self, key: Any, rows: Any, ctx: Any) -> Any:
        for row in rows:
            what, n = row.v % 10, row.v // 10
            if what == 0:
                self.value.update((n, f"t{n}" * n))
            elif what == 1:
                self.value.clear()
            elif what in (2, 3):
                self.entries.update_value((f"w{n % 4}",), (n,))
            elif what == 4:
                self.entries.remove_key((f"w{n % 4}",))
            elif what in (5, 6):
                self.elements.append((n,))
            elif what == 7:
                self.elements.clear()
            elif what == 8:
                self.most.add((n,))
            elif n % 2:
                ctx.timers.register(FAR_MS + n)
            else:
                ctx.timers.delete(FAR_MS + n + 1)
        return ()


class Model:
    """The state of a key in plain Python."""

    def __init__(self) -> None:
        self.value: Any = None
        self.entries: dict[str, int] = {}
        self.elements: list[int] = []
        self.most: int | None = None
        self.timers: set[int] = set()

    def do(self, v: int) -> None:
        what, n = v % 10, v // 10
        if what == 0:
            self.value = {"n": n, "text": f"t{n}" * n}
        elif what == 1:
            self.value = None
        elif what in (2, 3):
            self.entries[f"w{n % 4}"] = n
        elif what == 4:
            self.entries.pop(f"w{n % 4}", None)
        elif what in (5, 6):
            self.elements.append(n)
        elif what == 7:
            self.elements.clear()
        elif what == 8:
            self.most = n if self.most is None else max(self.most, n)
        elif n % 2:
            self.timers.add(FAR_MS + n)
        else:
            self.timers.discard(FAR_MS + n + 1)

    def rows(self) -> dict[str, list[Any]]:
        return {
            "value": [] if self.value is None else [self.value],
            "entries": [({"word": w}, {"n": self.entries[w]}) for w in sorted(self.entries)],
            "elements": [{"n": n} for n in self.elements],
            "most": [] if self.most is None else [{"n": self.most}],
            "timers": sorted(self.timers),
        }


def shown(models: dict[int, Model], state: str) -> dict[int, list[Any]]:
    return {key: rows for key, one in models.items() if (rows := one.rows()[state])}


def found(uri: str, state: str, **given: Any) -> dict[int, list[Any]]:
    if state == "timers":
        rows = statebackend.read_timers(uri, "job", "op", **given).read_all().to_pylist()
    else:
        rows = statebackend.read_state(uri, "job", "op", state, **given).read_all().to_pylist()
    made = defaultdict(list)
    for row in rows:
        one = row["at_ms"] if state == "timers" else row["value"]
        made[row["key"]["k"]].append((row["map_key"], one) if "map_key" in row else one)
    return dict(made)


EPOCHS = st.lists(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 99)), max_size=12), min_size=1, max_size=5
)


@pytest.mark.full  # a second for each example: a whole job with its restarts
@settings(max_examples=10)
@given(history=EPOCHS, parallelism=st.lists(st.integers(1, 3), min_size=5, max_size=5))
def test_a_random_history_reads_as_a_dict_at_each_of_its_epochs(
    tmp_path_factory: pytest.TempPathFactory,
    history: list[list[tuple[int, int]]],
    parallelism: list[int],
) -> None:
    folder = tmp_path_factory.mktemp("told")
    job = InProcessJob(folder / "run", time_mode="processing", retain_epochs=9, base_every_epochs=2)
    (folder / "run" / "store").mkdir(parents=True)
    (folder / "job").symlink_to(folder / "run" / "store")
    models: dict[int, Model] = defaultdict(Model)
    truth = []
    for epoch, part in enumerate(history):
        if not epoch or parallelism[epoch] != parallelism[epoch - 1]:
            job.start(Told(), parallelism=parallelism[epoch])
        job.run(part)
        for key, v in part:
            models[key].do(v)
        truth.append(copy.deepcopy(models))
    uri = folder.as_uri()
    for epoch, models in enumerate(truth):
        for state in (*STATES, "timers"):
            assert found(uri, state, epoch=epoch) == shown(models, state), (epoch, state)
    wanted = [key for key in range(7) if key % 2]
    odd = {key: one for key, one in truth[-1].items() if key % 2}
    for state in (*STATES, "timers"):
        assert found(uri, state, keys=wanted) == shown(odd, state)


@pytest.mark.full  # random values of every type: some seconds
@settings(max_examples=20)
@given(
    keys=tables(types(maps=False)),
    map_keys=tables(types(maps=False)),
    values=tables(types(maps=True)),
    kind=st.sampled_from(["value", "list", "map", "split", "union", "broadcast"]),
    expires=st.booleans(),
    parallelism=st.sampled_from([1, 3]),
)
def test_what_is_written_is_read_for_every_type_and_kind(
    tmp_path_factory: pytest.TempPathFactory,
    keys: Any,
    map_keys: Any,
    values: Any,
    kind: str,
    expires: bool,
    parallelism: int,
) -> None:
    of_keys = kind in ("value", "list", "map")
    some = zip(keys[1], map_keys[1], values[1], strict=False)
    rows = [row for row in some if any(value is not None for value in row[0])]
    columns = {
        name: pa.StructArray.from_arrays(to_arrow(schema, [r[n] for r in rows]), names=schema.names)
        for n, (name, (schema, _)) in enumerate(
            (("key", keys), ("map_key", map_keys), ("value", values))
        )
    }
    times = pa.array(range(len(rows)), pa.int64())
    names = ["key"] * of_keys + ["map_key"] * (kind in ("map", "broadcast")) + ["value"]
    table = pa.table({name: columns[name] for name in names})
    if kind == "list":
        table = table.append_column("index", times)
    ttl = {"s": TTL(1_000)} if expires and of_keys else {}
    if ttl:
        table = table.append_column("expires_at_ms", times)
    where = "states" if of_keys else "broadcast_maps" if kind == "broadcast" else "operator_lists"
    one = OperatorState(
        keys[0],
        schemas={"s": values[0]},
        ttl=ttl,
        list_modes={"s": kind} if where == "operator_lists" else {},
        **{where: {"s": table}},
    )
    to = (tmp_path_factory.mktemp("any") / "saved").as_uri()
    statebackend.write_savepoint(to, {"op": one}, max_parallelism=16, parallelism=parallelism)
    back = statebackend.read_state("", None, "op", "s", savepoint=to).read_all()
    given_rows = by_place(table, kind, keys[0], map_keys[0])
    read_rows = by_place(back, kind, keys[0], map_keys[0])
    assert given_rows.keys() == read_rows.keys()
    for place, mine in given_rows.items():
        last = mine if kind in ("list", "split", "union") else mine[-1:]
        assert same(last, read_rows[place]), place


def by_place(
    table: pa.Table, kind: str, key: T.StructType, map_key: T.StructType
) -> dict[bytes, list[Any]]:
    """What stands under each key, as bytes: values, and when they expire."""
    table = table.combine_chunks()
    places = [b""] * len(table)
    for name, schema in (("key", key), ("map_key", map_key)):
        if name in table.schema.names and len(table):
            arrays = table.column(name).chunk(0).flatten()
            codec = KeyCodec(schema, allow_all_null=name == "map_key")
            encoded = codec.encode_arrow(arrays).to_pylist()
            places = [place + one for place, one in zip(places, encoded, strict=True)]
    times: list[Any] = [None] * len(table)
    if "expires_at_ms" in table.schema.names:
        times = table.column("expires_at_ms").to_pylist()
    found: dict[bytes, list[Any]] = {}
    for place, value, time in zip(places, table.column("value").to_pylist(), times, strict=True):
        found.setdefault(place, []).append((value, time))
    return found
