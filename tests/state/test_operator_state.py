"""State that belongs to no key: lists of a subtask, and maps that all subtasks share."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import IntegerType, LongType, StringType, StructType

from statebackend.errors import (
    BroadcastWriteError,
    CorruptionError,
    FormatError,
    SettingError,
    StateMismatchError,
    UnsupportedFormatError,
    ValueMismatchError,
)
from statebackend.operators.operator_snapshot import (
    HeldOperatorState,
    OperatorSnapshot,
    StoredOperatorState,
)
from statebackend.schema.codec import codec_for
from statebackend.schema.ddl import parse_ddl
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.schema.versioned_rows import codec_of_versions
from statebackend.state.operator_state import (
    BroadcastState,
    OperatorList,
    StoredList,
    StoredMap,
    WriteGate,
    decode_lists,
    decode_maps,
    encode_lists,
    encode_maps,
    redistribute,
)

NUMBER = StructType().add("n", LongType())
CODEC = codec_for(NUMBER)


def stored(*numbers: int, mode: str = "split") -> StoredList:
    return StoredList(mode, NUMBER.json(), 0, tuple(CODEC.encode((n,)) for n in numbers))


def numbers(one: StoredList) -> list[int]:
    return [CODEC.decode(row)[0] for row in one.rows]


def spread(old: list[dict[str, StoredList]], parallelism: int, name: str = "s") -> list[list[int]]:
    new = [redistribute(old, parallelism, index) for index in range(parallelism)]
    return [numbers(one[name]) for one in new]


# --- another parallelism -------------------------------------------------------------------------

TABLED = [{"s": stored(0, 1, 2, 3)}, {"s": stored(10, 11, 12)}, {"s": stored()}]


@pytest.mark.parametrize(
    ("parallelism", "expected"),
    [
        (1, [[0, 1, 2, 3, 10, 11, 12]]),
        (3, [[0, 1, 2, 3], [10, 11, 12], []]),
        (4, [[0, 1], [2, 3], [10, 11], [12]]),
        (9, [[0], [1], [2], [3], [10], [11], [12], [], []]),
    ],
)
def test_a_split_list_is_spread_as_tabulated(parallelism: int, expected: list[list[int]]) -> None:
    assert spread(TABLED, parallelism) == expected


def test_several_lists_are_spread_each_for_itself() -> None:
    old = [{"a": stored(1, 2, 3), "b": stored(7)}, {"a": stored(), "b": stored(8, 9)}]
    assert spread(old, 3, "a") == [[1], [2], [3]]
    assert spread(old, 3, "b") == [[7], [8], [9]]


def test_a_union_list_goes_to_every_subtask_whole() -> None:
    old = [{"s": stored(1, 2, mode="union")}, {"s": stored(3, mode="union")}]
    assert spread(old, 3) == [[1, 2, 3]] * 3
    assert spread(old, 2) == [[1, 2, 3]] * 2


def test_a_state_that_only_some_subtasks_had_is_spread() -> None:
    assert spread([{}, {"s": stored(1, 2)}], 2) == [[], [1, 2]]
    assert spread([{}, {"s": stored(1, 2)}], 3) == [[1], [2], []]


def test_a_subtask_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SettingError):
        redistribute([], 2, 2)


def test_subtasks_that_disagree_on_a_mode_are_refused() -> None:
    with pytest.raises(StateMismatchError, match="several modes"):
        redistribute([{"s": stored(1)}, {"s": stored(2, mode="union")}], 1, 0)


@given(
    st.lists(
        st.tuples(st.integers(1, 7), st.lists(st.tuples(st.integers(0, 6), st.integers()))),
        max_size=6,
    )
)
def test_rows_that_are_added_and_rescaled_are_neither_lost_nor_doubled(
    steps: list[tuple[int, list[tuple[int, int]]]],
) -> None:
    subtasks: list[list[int]] = [[]]
    model = Counter[int]()
    for parallelism, added in steps:
        blobs = [encode_lists({"s": stored(*rows)}) for rows in subtasks]
        subtasks = spread([decode_lists(blob) for blob in blobs], parallelism)
        lengths = [len(rows) for rows in subtasks]
        if len(blobs) != parallelism:
            assert max(lengths) - min(lengths) <= 1
            assert lengths == sorted(lengths, reverse=True)
        for subtask, number in added:
            number %= 1 << 60
            subtasks[subtask % parallelism].append(number)
            model[number] += 1
    assert Counter(number for rows in subtasks for number in rows) == model


# --- lists -------------------------------------------------------------------------------------


def test_a_list_keeps_its_order() -> None:
    state = OperatorList("s", CODEC)
    for n in (3, 1, 2):
        state.add((n,))
    assert list(state.get()) == [(3,), (1,), (2,)]
    assert len(state) == 3
    state.update([(9,)])
    assert list(state.get()) == [(9,)]
    state.clear()
    assert list(state.get()) == []


def test_what_is_added_while_a_list_is_read_does_not_show() -> None:
    state = OperatorList("s", CODEC)
    state.add((1,))
    rows = state.get()
    state.add((2,))
    assert list(rows) == [(1,)]


def test_an_update_that_fails_leaves_the_list_as_it_was() -> None:
    state = OperatorList("s", CODEC)
    state.add((1,))
    with pytest.raises(ValueMismatchError):
        state.update([(2,), ("no number",)])
    assert list(state.get()) == [(1,)]


def test_a_value_that_is_changed_later_changes_neither_state_nor_snapshot() -> None:
    schema = parse_ddl("items array<int>")
    assert isinstance(schema, StructType)
    held = HeldOperatorState(StoredOperatorState())
    held.hold("s", "split", codec_for(schema), None, schema.json(), "")
    state: Any = held.states["s"]
    items = [1, 2]
    state.add((items,))
    items.append(3)
    snapshot = held.snapshot()
    state.add(([9],))
    next(state.get())[0].append(4)
    assert snapshot.lists is not None
    (row,) = decode_lists(snapshot.lists)["s"].rows
    assert codec_for(schema).decode(row) == ([1, 2],)


# --- broadcast maps ------------------------------------------------------------------------------

NAME = StructType().add("k", StringType())


def shared(entries: Any = None, *, is_open: bool = True) -> BroadcastState:
    gate = WriteGate()
    gate.is_open = is_open
    return BroadcastState("rules", KeyCodec(NAME, allow_all_null=True), CODEC, gate, entries)


def test_a_broadcast_map_is_written_and_read() -> None:
    state = shared()
    state.put(("b",), (2,))
    state.put(("a",), (1,))
    state.put(("b",), (3,))
    assert list(state.items()) == [(("a",), (1,)), (("b",), (3,))]
    assert state.get(("b",)) == (3,)
    state.put(("b",), (4,))
    assert state.get(("b",)) == (4,)
    assert list(state.items()) == [(("a",), (1,)), (("b",), (4,))]
    state.remove(("a",))
    assert not state.contains(("a",))
    assert state.get(("a",)) is None
    state.clear()
    assert len(state) == 0
    assert state.get(("b",)) is None


def test_what_it_was_made_from_is_not_changed() -> None:
    before = shared()
    before.put(("a",), (1,))
    entries = dict(before.stored())
    after = shared(before.stored())
    after.put(("b",), (2,))
    after.remove(("a",))
    assert before.stored() == entries


@pytest.mark.parametrize("write", ["put", "remove", "clear"])
def test_writing_outside_process_broadcast_is_refused(write: str) -> None:
    state = shared(is_open=False)
    args: dict[str, tuple[Any, ...]] = {"put": (("a",), (1,)), "remove": (("a",),), "clear": ()}
    with pytest.raises(BroadcastWriteError, match="outside process_broadcast") as caught:
        getattr(state, write)(*args[write])
    assert "same in all subtasks" in caught.value.todo


def test_rows_that_could_be_changed_are_given_out_anew() -> None:
    schema = parse_ddl("items array<int>")
    assert isinstance(schema, StructType)
    gate = WriteGate()
    gate.is_open = True
    state = BroadcastState("rules", KeyCodec(NAME), codec_for(schema), gate)
    state.put(("a",), ([1],))
    for _ in range(2):
        found = state.get(("a",))
        assert found == ([1],)
        found[0].append(2)
        ((_, row),) = state.items()
        assert row == ([1],)
        row[0].append(2)


def test_equal_maps_are_equal_bytes_whatever_the_way_to_them() -> None:
    one, other = shared(), shared()
    for key in "abc":
        one.put((key,), (1,))
    for key in "cxab":
        other.put((key,), (7,))
    other.remove(("x",))
    for key in "bac":
        other.put((key,), (1,))

    def blob(state: BroadcastState) -> bytes:
        return encode_maps({"rules": StoredMap(NAME.json(), NUMBER.json(), 0, state.stored())})

    assert blob(one) == blob(other)
    assert decode_maps(blob(one))["rules"].entries == one.stored()


# --- blobs -------------------------------------------------------------------------------------

MAPS = {"m": StoredMap(NAME.json(), NUMBER.json(), 0, {b"k": CODEC.encode((1,))})}


def test_blobs_read_back_as_they_were() -> None:
    lists = {"b": stored(1, 2), "a": stored(3, mode="union")}
    assert decode_lists(encode_lists(lists)) == lists
    assert decode_maps(encode_maps(MAPS)) == MAPS
    assert encode_lists(lists) == encode_lists(dict(reversed(lists.items())))


@pytest.mark.parametrize("kind", ["lists", "maps"])
def test_every_damage_is_a_typed_error(kind: str) -> None:
    blob = encode_lists({"s": stored(1, 2)}) if kind == "lists" else encode_maps(MAPS)
    decode: Any = decode_lists if kind == "lists" else decode_maps
    for cut in range(len(blob)):
        with pytest.raises(CorruptionError):
            decode(blob[:cut], "x")
    for place in range(len(blob)):
        flipped = bytearray(blob)
        flipped[place] ^= 0x41
        with pytest.raises(FormatError, match="'x'"):
            decode(bytes(flipped), "x")
    with pytest.raises(CorruptionError):
        decode(b"", "x")


def test_one_kind_is_not_taken_for_the_other() -> None:
    with pytest.raises(CorruptionError):
        decode_maps(encode_lists({"s": stored(1)}))


def test_a_later_format_says_so() -> None:
    blob = bytearray(encode_maps(MAPS))
    blob[8] = 9
    with pytest.raises(UnsupportedFormatError, match="version 9"):
        decode_maps(bytes(blob))


# --- all of a subtask's --------------------------------------------------------------------------


def held(before: OperatorSnapshot | None, *states: tuple[str, str]) -> HeldOperatorState:
    made = HeldOperatorState(before.stored if before else StoredOperatorState())
    for name, kind in states:
        key = KeyCodec(NAME) if kind == "broadcast" else None
        made.hold(name, kind, CODEC, key, NUMBER.json(), NAME.json() if key else "")
    return made


def test_a_name_under_another_mode_is_refused() -> None:
    first = held(None, ("s", "split"), ("m", "broadcast"))
    first.gate.is_open = True
    first.states["s"].add((5,))  # type: ignore[union-attr]
    first.states["m"].put(("a",), (1,))  # type: ignore[union-attr]
    for name, kind in (("s", "union"), ("s", "broadcast"), ("m", "split")):
        with pytest.raises(StateMismatchError, match="was stored with the mode"):
            held(first.snapshot(), (name, kind))


def test_a_state_that_nobody_asks_for_is_carried_on() -> None:
    first = held(None, ("s", "split"))
    first.states["s"].add((5,))  # type: ignore[union-attr]
    second = held(first.snapshot(), ("s", "split"))
    assert second.snapshot() == first.snapshot()


def test_without_such_states_there_is_nothing_to_store() -> None:
    assert held(None).snapshot() == OperatorSnapshot(StoredOperatorState(), None, None)
    assert held(None, ("s", "union")).snapshot().maps is None


def test_states_that_were_emptied_are_stored_as_if_they_had_never_been() -> None:
    both = held(None, ("s", "split"), ("t", "union"), ("m", "broadcast"), ("n", "broadcast"))
    one = held(None, ("t", "union"), ("n", "broadcast"))
    for made in (both, one):
        made.gate.is_open = True
        for name in made.states:
            state: Any = made.states[name]
            state.add((5,)) if isinstance(state, OperatorList) else state.put(("a",), (1,))
    full = both.snapshot()
    for name in ("s", "m"):
        both.states[name].clear()
    assert both.snapshot() == one.snapshot(), "equal content, equal bytes"
    for name in ("t", "n"):
        both.states[name].clear()
    assert both.snapshot() == OperatorSnapshot(StoredOperatorState(), None, None)
    again = held(full, ("s", "split"), ("m", "broadcast"))
    assert (len(again.states["s"]), len(again.states["m"])) == (1, 1), "what was frozen stays"


def test_empty_states_that_an_earlier_release_stored_are_read() -> None:
    lists = encode_lists({"s": StoredList("split", NUMBER.json(), 0, ())})
    maps = encode_maps({"m": StoredMap(NAME.json(), NUMBER.json(), 0, {})})
    before = StoredOperatorState(decode_lists(lists), decode_maps(maps))
    made = HeldOperatorState(before)
    made.hold("s", "split", CODEC, None, NUMBER.json(), "")
    made.hold("m", "broadcast", CODEC, KeyCodec(NAME), NUMBER.json(), NAME.json())
    assert (len(made.states["s"]), len(made.states["m"])) == (0, 0)
    assert made.snapshot() == OperatorSnapshot(StoredOperatorState(), None, None)


def test_rows_of_an_older_schema_are_read_and_stored_anew() -> None:
    new = StructType().add("n", LongType()).add("x", IntegerType())
    codec = codec_of_versions([NUMBER, new])
    first = held(None, ("s", "split"), ("m", "broadcast"))
    first.states["s"].add((5,))  # type: ignore[union-attr]
    first.gate.is_open = True
    first.states["m"].put(("a",), (6,))  # type: ignore[union-attr]
    second = HeldOperatorState(first.snapshot().stored)
    second.hold("s", "split", codec, None, new.json(), "")
    second.hold("m", "broadcast", codec, KeyCodec(NAME), new.json(), NAME.json())
    rows: Any = second.states["s"]
    shared_map: Any = second.states["m"]
    assert list(rows.get()) == [(5, None)]
    assert shared_map.get(("a",)) == (6, None)
    again = second.snapshot()
    assert again.lists is not None
    assert decode_lists(again.lists)["s"] == StoredList(
        "split", new.json(), 1, (codec.encode((5, None)),)
    )
