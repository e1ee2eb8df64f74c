"""Nobody can write to what all epochs share: a change is refused, or noticed and undone."""

from __future__ import annotations

import copy
import pickle
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pandas as pd
import pytest

from statebackend.errors import ProcessorError
from statebackend.runtime.worker import shipped_processor as shipped_module
from tests.spark.shipped import *  # noqa: F403
from tests.spark.shipped import processor, shipped, table

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
