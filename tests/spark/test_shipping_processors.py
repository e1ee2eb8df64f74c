"""A processor travels small: what is large in it goes apart, once, and is loaded once."""

from __future__ import annotations

import abc
import gc
import sys
import threading
import types
from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from statebackend.runtime.worker.shipped_processor import Constant, ConstantCache
from statebackend.runtime.worker.unpicklable import explain_unpicklable
from tests.spark.shipped import *  # noqa: F403
from tests.spark.shipped import _by_value, names, processor, shipped, table

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
