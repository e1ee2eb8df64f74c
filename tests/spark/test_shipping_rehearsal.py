"""A rehearsal of a processor on the driver, and what cannot be pickled or loaded, by name."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sqlite3
import sys
import threading
import types
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
from pyspark import cloudpickle

from statebackend.errors import ProcessorError
from statebackend.runtime.worker.shipped_constants import pack
from statebackend.runtime.worker.shipped_processor import ShippedProcessor
from statebackend.runtime.worker.unpicklable import explain_unpicklable
from tests.spark.shipped import *  # noqa: F403
from tests.spark.shipped import LIMIT, _by_value, names, processor, shipped, table

T = TypeVar("T")


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


def test_a_module_that_a_module_in_the_worker_imports_is_named_with_what_sends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = _of_a_module(tmp_path, monkeypatch, "imports_what_is_not_sent")
    (tmp_path / "imports_what_is_not_sent.py").write_text("\nimport not_sent\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ProcessorError,
        match=r"no module 'not_sent', which .*imports_what_is_not_sent\.py:2 imports\."
        r".*addPyFile\('not_sent\.py'\).*--py-files",
    ):
        one.fresh()


def test_a_module_that_fails_in_the_worker_is_told_apart_from_one_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = _of_a_module(tmp_path, monkeypatch, "reads_what_is_not_there")
    (tmp_path / "reads_what_is_not_there.py").write_text("\nopen('/nobody/has/it')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ProcessorError, match=r"fails when it is imported .*nobody/has/it.*py:2\."
    ) as raised:
        one.fresh()
    assert "addPyFile" not in str(raised.value)
