"""State with a time to live is like its model, however it is spilled and layered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statebackend.rocks.store import RocksStore
from statebackend.state import expiry_index
from statebackend.state.table import MemoryBase
from statebackend.state.ttl_cells import TTL
from tests.state.expiring import *  # noqa: F403
from tests.state.expiring import ALL, OWNERS, Subtask, _check_index, seen

# --- against a model ----------------------------------------------------------------------------


OWNER = st.integers(0, len(OWNERS) - 1)
NAME = st.sampled_from(["x", "y", "zz"])
CHANGE = st.tuples(
    st.sampled_from(
        ["update", "clear value", "append", "put", "clear list", "set", "set", "remove",
         "clear map", "read"]
    ),
    OWNER,
    NAME,
)  # fmt: skip
RULES = st.sampled_from(
    [TTL(64, update=u, expired=e) for u in ("write", "create", "read")
     for e in ("hide", "until_cleaned")]
)  # fmt: skip
PIECES = st.sampled_from([1, 2, 1 << 16])  # how many elements of a list are read at once
EPOCH = st.tuples(
    st.integers(0, 70),  # time that goes by
    st.lists(CHANGE, max_size=15),
    st.sampled_from([0, 1, 3, ALL]),  # limit of the removal
    st.sampled_from(["end", "confirm", "reopen"]),
    st.sampled_from([None, 20, 64, 200]),  # the TTL from here on
)


class Model:
    """What is there by the rules: for each owner, slots in order, each (row, expiry)."""

    def __init__(self) -> None:
        self.slots: dict[int, dict[Any, tuple[Any, int]]] = {n: {} for n in range(len(OWNERS))}
        self.appended = 0

    def write(self, owner: int, slot: Any, row: Any, ttl: TTL, now_ms: int) -> None:
        before = self.slots[owner].get(slot)
        expiry = now_ms + ttl.ms
        if ttl.update == "create" and before is not None and before[1] > now_ms:
            expiry = before[1]
        self.slots[owner][slot] = (row, expiry)

    def drop(self, owner: int, kind: str) -> None:
        slots = self.slots[owner]
        self.slots[owner] = {slot: kept for slot, kept in slots.items() if slot[0] != kind}

    def shown(self, owner: int, kind: str, now_ms: int) -> list[tuple[Any, Any]]:
        return [
            (slot[1], row)
            for slot, (row, expiry) in sorted(self.slots[owner].items())
            if slot[0] == kind and expiry > now_ms
        ]


def _apply(subtask: Subtask, model: Model, change: tuple[str, int, str], n: int) -> None:
    verb, owner, name = change
    ttl, now_ms, row = subtask.ttl, subtask.now_ms, (n,)
    subtask.at(owner)
    if verb == "update":
        subtask.value.update(row)
        model.write(owner, ("value", 0), row, ttl, now_ms)
    elif verb == "append":
        subtask.list.append(row)
        model.write(owner, ("list", n), row, ttl, now_ms)
    elif verb == "put":
        subtask.list.put([row, row])
        model.drop(owner, "list")
        model.write(owner, ("list", n), row, ttl, now_ms)
        model.write(owner, ("list", n + 0.5), row, ttl, now_ms)
    elif verb == "set":
        subtask.map.update_value((name,), row)
        model.write(owner, ("map", (name,)), row, ttl, now_ms)
    elif verb == "remove":
        subtask.map.remove_key((name,))
        model.slots[owner].pop(("map", (name,)), None)
    elif verb == "read":
        _compare(subtask, model, owner)
    else:
        kind = verb.split()[1]
        getattr(subtask, kind).clear()
        model.drop(owner, kind)


def _compare(subtask: Subtask, model: Model, owner: int) -> None:
    subtask.at(owner)
    ttl, now_ms = subtask.ttl, subtask.now_ms
    value, rows, entries = seen(subtask)
    shown = {
        "value": [(0, value)] if value is not None else [],
        "list": [(None, row) for row in rows],
        "map": sorted(entries.items()),
    }
    for kind, found in shown.items():
        expected = model.shown(owner, kind, now_ms)
        stored = model.shown(owner, kind, -1)
        if kind == "list":
            expected = [(None, row) for _, row in expected]
            stored = [(None, row) for _, row in stored]
        if ttl.expired == "hide":
            assert found == expected
        else:  # between what is not expired and what was ever written, in its order
            assert [one for one in found if one in expected] == expected
            assert [one for one in stored if one in found] == found
    if ttl.update == "read":
        for slot, (row, expiry) in model.slots[owner].items():
            if expiry > now_ms and now_ms + ttl.ms - expiry >= max(1, ttl.ms // 100):
                model.slots[owner][slot] = (row, now_ms + ttl.ms)


def _runs_like_the_model(base: Any, folder: Path, limit: int, ttl: TTL, epochs: Any) -> None:
    subtask, model = Subtask(base, folder, ttl, limit_bytes=limit), Model()
    n = 0
    try:
        for ahead_ms, changes, cleaned, then, ttl_ms in epochs:
            for change in changes:
                n += 1
                _apply(subtask, model, change, n)
            subtask.clean(cleaned)
            _check_index(subtask)
            new = TTL(ttl_ms, subtask.ttl.update, subtask.ttl.expired) if ttl_ms else None
            subtask.end(subtask.now_ms + ahead_ms, new, then)
            for owner in range(len(OWNERS)):
                _compare(subtask, model, owner)
        subtask.end(subtask.now_ms + 1000)
        subtask.clean()
        assert subtask.stored() == []
    finally:
        subtask.spill.close()


@pytest.mark.parametrize("limit_bytes", [1 << 30, 1_500, 1])
@given(ttl=RULES, epochs=st.lists(EPOCH, max_size=6), piece_rows=PIECES)
@settings(deadline=None, max_examples=50)
def test_state_with_a_ttl_is_like_its_model_however_it_is_spilled_and_layered(
    tmp_path_factory: pytest.TempPathFactory,
    limit_bytes: int,
    ttl: TTL,
    epochs: Any,
    piece_rows: int,
) -> None:
    folder = tmp_path_factory.mktemp("ttl", numbered=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expiry_index, "_PIECE_ROWS", piece_rows)
        _runs_like_the_model(MemoryBase(), folder / "spill", limit_bytes, ttl, epochs)


@given(ttl=RULES, epochs=st.lists(EPOCH, max_size=5), limit=st.sampled_from([1 << 30, 1_500]))
@settings(deadline=None, max_examples=25)
def test_state_with_a_ttl_is_like_its_model_on_the_real_store(
    tmp_path_factory: pytest.TempPathFactory, limit: int, ttl: TTL, epochs: Any
) -> None:
    folder = tmp_path_factory.mktemp("ttl", numbered=True)
    store = RocksStore.open(str(folder / "db"))
    try:
        _runs_like_the_model(store, folder / "spill", limit, ttl, epochs)
    finally:
        store.close()
