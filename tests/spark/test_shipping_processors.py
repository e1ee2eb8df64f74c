"""A processor travels small: what is large in it goes apart, once, and is loaded once."""

from __future__ import annotations

import abc
import copy
import dataclasses
import enum
import gc
import importlib
import io
import pickle
import sqlite3
import sys
import threading
import types
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.serializers import ChunkedStream

from statebackend.errors import ProcessorError
from statebackend.runtime.worker import shipped_processor as shipped_module
from statebackend.runtime.worker.shipped_constants import pack, ship
from statebackend.runtime.worker.shipped_processor import Constant, ConstantCache, ShippedProcessor
from statebackend.runtime.worker.unpicklable import explain_unpicklable

LIMIT = 10_000
T = TypeVar("T")


class Processor:
    """Any class will do: nothing is called."""


class Sink(io.BytesIO):
    """Keeps what was written when it is closed."""

    def close(self) -> None:
        self.data = self.getvalue()
        super().close()


def read_chunks(framed: bytes) -> bytes:
    data, at = bytearray(), 0
    while (size_bytes := int.from_bytes(framed[at : at + 4], "big", signed=True)) >= 0:
        data += framed[at + 4 : at + 4 + size_bytes]
        at += 4 + size_bytes
    return bytes(data)


class FakeBroadcast:
    """As Spark's: the value is pickled at once, and unpickled when it is first asked for."""

    made: int = 0

    def __init__(self, value: Any) -> None:
        sink = Sink()
        stream = ChunkedStream(sink, 8192)
        pickle.dump(value, stream, protocol=5)  # as with spark.io.encryption.enabled
        stream.close()
        self.data = read_chunks(sink.data)
        self.loads = 0

    @property
    def value(self) -> Any:
        if not hasattr(self, "_value"):
            self._value = pickle.loads(self.data)
            self.loads += 1
        return self._value


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> ConstantCache:
    """A worker process that has loaded nothing yet."""
    cache = ConstantCache()
    monkeypatch.setattr(shipped_module, "CONSTANTS", cache)
    return cache


def processor(**attributes: Any) -> Processor:
    made = Processor()
    vars(made).update(attributes)
    return made


def shipped(made: Any, limit_bytes: int = LIMIT, known: Any = None) -> ShippedProcessor:
    fake: Any = FakeBroadcast
    return ship(made, uid="op", limit_bytes=limit_bytes, broadcast=fake, known=known)


def names(one: ShippedProcessor) -> list[str]:
    return sorted(part.name for part in one.parts)


def table(entries: int = 5_000) -> dict[int, str]:
    return {index: f"value {index}" for index in range(entries)}


# --- what is taken out ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        b"x" * 20_000,
        "x" * 20_000,
        bytearray(20_000),
        list(range(10_000)),
        tuple(range(10_000)),
        set(range(10_000)),
        frozenset(range(10_000)),
        table(),
        Counter(table()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_large_value_goes_apart_and_comes_back_equal(value: Any) -> None:
    one = shipped(processor(table=value, small=[1, 2]))
    assert names(one) == ["self.table"]
    assert len(one.data) < 1_000
    made = one.fresh()
    assert made.table == value
    assert isinstance(made.table, type(value))
    assert made.small == [1, 2]


def test_arrays_tables_and_frames_go_apart() -> None:
    frame = pd.DataFrame({"a": np.arange(5_000), "b": [f"x{i}" for i in range(5_000)]})
    one = shipped(
        processor(
            array=np.arange(5_000),
            objects=np.array([f"x{i}" for i in range(5_000)], dtype=object),
            table=pa.table({"a": range(5_000)}),
            frame=frame,
        )
    )
    assert names(one) == ["self.array", "self.frame", "self.objects", "self.table"]
    made = one.fresh()
    assert made.array.tolist() == list(range(5_000))
    assert made.objects[7] == "x7"
    assert made.table.equals(pa.table({"a": range(5_000)}))
    pd.testing.assert_frame_equal(made.frame, frame)


def test_a_small_processor_has_no_parts() -> None:
    one = shipped(processor(table=table(10), array=np.arange(10)))
    assert one.parts == ()
    assert one.fresh().table == table(10)


def test_a_limit_of_zero_takes_nothing_out() -> None:
    one = shipped(processor(table=table()), limit_bytes=0)
    assert one.parts == ()
    assert type(one.fresh().table) is dict


def test_large_values_in_small_containers_and_objects_go_apart_and_the_rest_stays() -> None:
    model = types.SimpleNamespace(weights=np.zeros(5_000), counter=0)
    one = shipped(processor(config={"left": table()}, pair=(1, b"x" * 20_000), model=model))
    assert names(one) == ["self.config['left']", "self.model.weights", "self.pair[1]"]
    made = one.fresh()
    made.config["new"] = made.model.counter = 1
    again = one.fresh()
    assert "new" not in again.config
    assert again.model.counter == 0
    assert again.model.weights is made.model.weights


def test_an_object_that_is_large_in_many_small_things_goes_apart_whole() -> None:
    tree: Any = None
    for index in range(200):
        tree = types.SimpleNamespace(left=tree, label="x" * 100 + str(index))
    one = shipped(processor(model=tree, own=[1]))
    assert names(one) == ["self.model"]
    assert one.fresh().model.left.label == "x" * 100 + "198"


def _by_value(**found: Any) -> type:
    """A class as of ``__main__``, whose method reads a global and a captured variable."""
    module = types.ModuleType("__main__")
    vars(module).update(found)
    code = """
def make(captured):
    class P:
        CLASS_TABLE = CLASS
        def read(self):
            return len(GLOBAL), len(captured), len(self.CLASS_TABLE)
    return P
kind = make(CAPTURED)
"""
    exec(code, vars(module))
    return vars(module)["kind"]  # type: ignore[no-any-return]


def test_globals_captured_variables_and_class_attributes_go_apart() -> None:
    kind = _by_value(GLOBAL=table(1_000), CAPTURED=table(2_000), CLASS=table(3_000))
    one = shipped(kind())
    assert names(one) == ["P.CLASS_TABLE", "captured variable captured", "global GLOBAL"]
    assert len(one.data) < 3_000
    assert one.fresh().read() == (1_000, 2_000, 3_000)


class Abstract(abc.ABC):
    """As Spark's StatefulProcessor."""

    @abc.abstractmethod
    def read(self) -> Any:
        """Something to define."""


def test_a_class_by_value_with_an_abstract_base_is_no_obstacle() -> None:
    kind = _by_value(GLOBAL=[], CAPTURED=[], CLASS=[])
    made = type("Q", (kind, Abstract), {"__module__": "__main__"})()
    made.lookup = Counter(table())
    assert names(shipped(made)) == ["self.lookup"]
    made.lock = threading.Lock()
    assert explain_unpicklable(made).startswith("self.lock (_thread.lock)")


def test_many_parts_are_fewer_and_larger_parts() -> None:
    made = processor(**{f"a{index}": np.zeros(2_000 + 500 * index) for index in range(60)})
    one = shipped(made)
    assert 0 < len(one.parts) <= 32
    assert all(len(getattr(one.fresh(), f"a{i}")) == 2_000 + 500 * i for i in range(60))


def test_a_processor_with_many_attributes_keeps_its_own_fields() -> None:
    made = processor(**{f"f{index}": [index] * 200 for index in range(100)})
    one = shipped(made)
    one.fresh().f7.append(1)
    assert one.fresh().f7 == [7] * 200


def test_what_refers_back_to_the_processor_stays_in_it() -> None:
    made = processor()
    made.table = dict.fromkeys(range(5_000), made)
    again = shipped(made, limit_bytes=1_000).fresh()
    assert again.table[3] is again


def test_one_object_by_two_names_stays_one() -> None:
    lookup = table()
    one = shipped(processor(a=lookup, b=lookup))
    assert len(one.parts) == 1
    made = one.fresh()
    assert made.a is made.b


# --- travelling and loading once -----------------------------------------------------------------


def test_what_spark_pickles_again_and_again_is_small() -> None:
    known: dict[str, Any] = {}
    one = shipped(processor(array=np.zeros(1_000_000), own=[]), known=known)
    size = len(one.data) + sum(len(part.name) + len(part.digest) for part in one.parts)
    assert size < 1_000
    assert [part.size_bytes for part in one.parts] == [pytest.approx(8_000_000, rel=0.01)]
    assert list(known) == [one.parts[0].digest]


def test_content_that_was_sent_before_is_not_sent_again() -> None:
    known: dict[str, Any] = {}
    first = shipped(processor(table=table()), known=known)
    second = shipped(processor(other=table()), known=known)
    assert len(known) == 1
    assert first.parts[0].broadcast is second.parts[0].broadcast


def test_constants_are_loaded_once_and_everything_else_for_each_epoch() -> None:
    one = shipped(processor(table=table(), array=np.zeros(5_000), seen=[]))
    first = one.fresh()
    first.seen.append("x")
    for _ in range(5):
        made = one.fresh()
        assert made is not first
        assert made.seen == []
        assert made.table is first.table
        assert made.array is first.array
    assert [part.broadcast.loads for part in one.parts] == [1, 1]  # type: ignore[attr-defined]


def test_another_broadcast_of_the_same_content_is_not_loaded() -> None:
    first, second = (shipped(processor(table=table())) for _ in range(2))
    assert first.fresh().table is second.fresh().table
    assert second.parts[0].broadcast.loads == 0  # type: ignore[attr-defined]


def test_arrays_are_views_of_what_was_read() -> None:
    made = shipped(processor(array=np.zeros(5_000))).fresh()
    assert made.array.base is not None
    assert not made.array.flags.writeable


def test_a_worker_lets_go_of_constants_that_no_task_used_for_long() -> None:
    cache = ConstantCache(kept_bytes=1_000, kept_uses=3)
    cache.use({"a": Constant("a", [1], 10)})
    for _ in range(2):
        cache.use({"b": Constant("b", [1], 10)})
        assert cache.find("a")
    cache.use({"b": Constant("b", [1], 10)})
    assert cache.find("a") is None
    assert len(cache) == 1


def test_a_worker_keeps_no_more_than_so_much_of_what_the_task_does_not_use() -> None:
    cache = ConstantCache(kept_bytes=1_000)
    for name, size_bytes in (("a", 600), ("b", 600), ("c", 100)):
        cache.use({name: Constant(name, [1], size_bytes)})
    assert [name for name in "abc" if cache.find(name)] == ["b", "c"]
    cache.use({"large": Constant("large", [1], 10**9)})
    assert [name for name in ("b", "c", "large") if cache.find(name)] == ["b", "c", "large"]
    cache.use({"c": Constant("c", [1], 100)})
    assert cache.find("large") is None


def test_packing_keeps_no_copy_on_the_driver() -> None:
    array = np.zeros(5_000)
    before = sys.getrefcount(array)
    one = shipped(processor(array=array))
    gc.collect()
    assert one.parts
    assert sys.getrefcount(array) == before


# --- writing to what is shared -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "write"),
    [
        (table(), lambda t: t.update(a=1)),
        (table(), lambda t: t.__setitem__(1, "other")),
        (table(), lambda t: t.pop(1)),
        (table(), lambda t: t.setdefault(1, 2)),
        (list(range(10_000)), lambda t: t.append(1)),
        (list(range(10_000)), lambda t: t.sort()),
        (list(range(10_000)), lambda t: t.__setitem__(0, 1)),
        (set(range(10_000)), lambda t: t.add(1)),
        (set(range(10_000)), lambda t: t.discard(1)),
    ],
)
def test_writing_to_a_shared_container_raises_and_says_what_to_do(value: Any, write: Any) -> None:
    made = shipped(processor(lookup=value)).fresh()
    with pytest.raises(TypeError, match=r"self\.lookup is a large constant.*constantBytes"):
        write(made.lookup)
    assert made.lookup == value


def test_every_way_to_write_to_a_container_is_refused() -> None:
    reads: dict[type, set[str]] = {
        dict: {"copy", "fromkeys", "get", "items", "keys", "values"},
        list: {"copy", "count", "index"},
        set: {"copy", "difference", "intersection", "isdisjoint", "issubset", "issuperset"}
        | {"symmetric_difference", "union"},
    }
    for plain, reading in reads.items():
        frozen = shipped_module._FROZEN[plain]
        writing = {name for name in vars(plain) if not name.startswith("_")} - reading
        writing |= {n for n in vars(plain) if n.startswith("__i") and n[3:-2] in _IN_PLACE}
        writing |= {n for n in ("__setitem__", "__delitem__") if n in vars(plain)}
        assert writing <= set(vars(frozen)), writing - set(vars(frozen))


_IN_PLACE = ("or", "and", "sub", "xor", "add", "mul")


def test_a_copy_of_a_shared_container_may_be_written_to() -> None:
    made = shipped(processor(lookup=table(), rows=list(range(10_000)))).fresh()
    for one in (
        made.lookup.copy(),
        copy.copy(made.lookup),
        copy.deepcopy(made.lookup),
        pickle.loads(pickle.dumps(made.lookup)),
        made.lookup | {},
    ):
        assert type(one) is dict
        one["new"] = 1
    made.rows.copy().append(1)
    made.rows[:].append(1)


def test_an_array_cannot_be_written_to() -> None:
    one = shipped(processor(array=np.zeros(5_000), odd=np.zeros((100, 100))[:, ::2]))
    made = one.fresh()
    for array in (made.array, made.odd):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_arrays_inside_of_a_shared_object_cannot_be_written_to() -> None:
    made = shipped(processor(arrays=[np.zeros(200) for _ in range(100)])).fresh()
    with pytest.raises(ValueError, match="read-only"):
        made.arrays[3][0] = 1


def test_a_frame_may_get_columns_for_an_epoch_but_its_values_cannot_be_written() -> None:
    one = shipped(processor(frame=pd.DataFrame({"a": np.arange(5_000)})))
    made = one.fresh()
    made.frame["b"] = 1
    with pytest.raises(ValueError, match="read-only"):
        made.frame.iloc[0, 0] = 7
    assert list(one.fresh().frame.columns) == ["a"]
    one.check_unchanged()


def test_a_bytearray_is_each_epochs_own() -> None:
    one = shipped(processor(scratch=bytearray(20_000)))
    one.fresh().scratch[0] = 1
    one.check_unchanged()
    assert one.fresh().scratch == bytearray(20_000)


def test_a_defaultdict_is_each_epochs_own_since_reading_changes_it() -> None:
    lookup = defaultdict(int, {index: index for index in range(5_000)})
    one = shipped(processor(lookup=lookup))
    assert one.parts == ()
    one.fresh().lookup[-1]
    assert len(one.fresh().lookup) == 5_000


def test_a_change_of_another_containers_size_is_noticed_and_undone() -> None:
    one = shipped(processor(lookup=Counter(table())))
    made = one.fresh()
    one.check_unchanged()
    made.lookup["new"] = 1
    with pytest.raises(ProcessorError, match=r"self\.lookup") as raised:
        one.check_unchanged()
    assert "constantBytes" in raised.value.todo
    assert one.fresh().lookup == Counter(table())


def test_a_container_inside_of_a_constant_that_grew_is_noticed() -> None:
    one = shipped(processor(lookup={index: [index] for index in range(5_000)}))
    one.fresh().lookup[4_999].append(1)
    with pytest.raises(ProcessorError, match=r"self\.lookup"):
        one.check_unchanged()
    assert one.fresh().lookup[4_999] == [4_999]


def test_a_change_before_an_epoch_failed_does_not_reach_the_next_attempt() -> None:
    one = shipped(processor(lookup=Counter(table())))
    one.fresh().lookup["new"] = 1
    assert "new" not in one.fresh().lookup


# --- the driver ----------------------------------------------------------------------------------


def test_a_rehearsal_has_its_own_fields_and_leaves_the_users_constants_alone() -> None:
    made: Any = processor(table=table(), seen=[], array=np.zeros(5_000))
    rehearsal = pack(made, uid="op", limit_bytes=LIMIT).rehearsal()
    rehearsal.seen.append(1)
    with pytest.raises(TypeError, match=r"self\.table"):
        rehearsal.table["new"] = 1
    with pytest.raises(ValueError, match="read-only"):
        rehearsal.array[0] = 1
    assert np.shares_memory(rehearsal.array, made.array)
    made.array[0] = 1
    made.table["new"] = 1
    assert made.seen == []


def test_a_rehearsal_runs_in_classes_of_its_own_and_the_callers_go_on_as_they_were() -> None:
    calls: list[str] = []

    class Colour(enum.Enum):
        RED = 1

    @dataclasses.dataclass
    class Point:
        x: int
        colour: Colour = Colour.RED

    class Base(Generic[T]):
        shown: T

        def init(self) -> None:
            calls.append("init")

    class Made(Base[int]):
        class Kept:
            seen = 0

        def __init__(self) -> None:
            self.points = [Point(n) for n in range(1_000)]  # apart, over the limit
            self.last = Point(-1)

        def init(self) -> None:
            super().init()
            type(self).Kept.seen += 1
            assert all(isinstance(one, Point) for one in (*self.points, self.last))
            assert all(one.colour is Colour.RED for one in self.points)

    kinds: list[Any] = [Colour, Point, Base, Made, Made.Kept]
    made = Made()
    packed = pack(made, uid="op", limit_bytes=LIMIT)
    assert [part.name for part in packed.parts] == ["self.points"]
    before = [dict(vars(kind)) for kind in kinds]
    rehearsal = packed.rehearsal()
    rehearsal.init()
    assert [dict(vars(kind)) for kind in kinds] == before
    assert type(rehearsal) is not Made
    assert (calls, Made.Kept.seen, type(rehearsal).Kept.seen) == ([], 0, 1)
    made.init()
    assert calls == ["init"]


def test_a_rehearsal_does_not_change_what_a_class_is_to_workers() -> None:
    class Made:
        pass

    first = pack(Made(), uid="op", limit_bytes=0)
    first.rehearsal()
    assert pack(Made(), uid="op", limit_bytes=0).data == first.data  # under the same id
    assert type(cloudpickle.loads(first.data)) is Made


def test_a_large_object_that_others_read_is_cut_where_it_is_and_not_with_them() -> None:
    tree: Any = None
    for index in range(200):
        tree = types.SimpleNamespace(left=tree, label="x" * 100 + str(index))
    kind = _by_value(GLOBAL=tree, CAPTURED=[], CLASS=[])
    made = kind()
    made.helper = kind()  # its methods read the tree
    made.helper.seen = []
    one = shipped(made)
    assert names(one) == ["global GLOBAL"]
    one.fresh().helper.seen.append(1)
    assert one.fresh().helper.seen == []


@pytest.mark.parametrize("limit_bytes", [0, LIMIT])
def test_an_attribute_that_cannot_be_pickled_is_named(limit_bytes: int) -> None:
    made = processor(table=table(), db=sqlite3.connect(":memory:"))
    with pytest.raises(ProcessorError, match=r"self\.db \(sqlite3\.Connection\)"):
        pack(made, uid="op", limit_bytes=limit_bytes)
    made.db.close()  # type: ignore[attr-defined]


def test_the_innermost_thing_that_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()
    inner = types.SimpleNamespace(locks=[1, {"a": lock}])
    assert explain_unpicklable(processor(helper=inner)).startswith(
        "self.helper.locks[1]['a'] (_thread.lock): TypeError: cannot pickle"
    )
    assert explain_unpicklable(processor(call=lambda: lock)).startswith(
        "lock (captured by <lambda>) (_thread.lock)"
    )
    kind = _by_value(GLOBAL=lock, CAPTURED=1, CLASS=1)
    assert explain_unpicklable(kind()).startswith("global GLOBAL (used in read) (_thread.lock)")
    kind = _by_value(GLOBAL=1, CAPTURED=1, CLASS=lock)
    assert explain_unpicklable(kind()).startswith("P.CLASS_TABLE (_thread.lock)")


def test_what_can_be_pickled_needs_no_explanation() -> None:
    assert explain_unpicklable(processor(a=1)) == "it can be pickled"


def test_a_part_that_does_not_load_in_the_worker_is_named() -> None:
    class Odd:
        def __reduce__(self) -> Any:
            return (int, ("not a number",))

    one = shipped(processor(table=[Odd() for _ in range(5_000)]))
    with pytest.raises(ProcessorError, match=r"self\.table cannot be loaded"):
        one.fresh()


def test_classes_of_main_are_one_class_in_parts_and_processor() -> None:
    kind = _by_value(GLOBAL=[], CAPTURED=[], CLASS=[])
    made = kind()
    made.points = [kind() for _ in range(5_000)]
    loaded = cloudpickle.loads(cloudpickle.dumps(1)) and shipped(made).fresh()
    assert type(loaded) is type(loaded.points[0])


# --- what a worker cannot load -------------------------------------------------------------------


def _of_a_module(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> ShippedProcessor:
    """A processor whose class is in a module that only the driver has."""
    (folder / f"{name}.py").write_text("class Mine:\n    pass\n")
    with monkeypatch.context() as here:
        here.syspath_prepend(folder)
        made = shipped(importlib.import_module(name).Mine())
    del sys.modules[name]
    importlib.invalidate_caches()
    return made


def test_a_module_that_the_worker_lacks_is_named_with_what_sends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = _of_a_module(tmp_path, monkeypatch, "only_the_driver_has_it")
    with pytest.raises(
        ProcessorError,
        match=r"no module 'only_the_driver_has_it'.*addPyFile\('only_the_driver_has_it\.py'\).*"
        "--py-files",
    ):
        one.fresh()


def test_a_module_that_fails_in_the_worker_is_told_apart_from_one_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = _of_a_module(tmp_path, monkeypatch, "imports_what_is_not_there")
    (tmp_path / "imports_what_is_not_there.py").write_text("\nimport nobody_has_it\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ProcessorError, match=r"fails when it is imported .*nobody_has_it.*py:2\."
    ) as raised:
        one.fresh()
    assert "addPyFile" not in str(raised.value)
