"""Tables whose overlay spills, with layers below, against plain dicts."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from snapshot.formats.delta import decode_delta, encode_delta
from statebackend.errors import LocalDirError
from statebackend.state import blocks as blocks_module
from statebackend.state import spill as spill_module
from statebackend.state.blocks import ABSENT, SortedRows, binary_array
from statebackend.state.spill import OverlayGauge, OverlaySpill, Run, count_merged, merge
from statebackend.state.table import MemoryBase, StateTable

PREFIXES = [b"\0\1a", b"\0\1b", b"\0\2", b"\0\2\xff"]
SUFFIXES = [bytes([n]) * m for n in (0, 1, 127, 128, 255) for m in (0, 1, 2)]
VALUES = st.one_of(st.none(), st.binary(max_size=4), st.just(b"x" * 50))
CHANGES = st.dictionaries(st.binary(max_size=3), VALUES, max_size=40)


def spill_in(path: Path, limit_bytes: int = 0) -> OverlaySpill:
    return OverlaySpill(limit_bytes=limit_bytes, folder=lambda: path)


def rows_of(changes: dict[bytes, bytes | None]) -> SortedRows:
    keys = sorted(changes)
    return SortedRows(binary_array(keys), binary_array([changes[key] for key in keys]))


class Table(RuleBasedStateMachine):
    """Writes, spills, freezes, applies, in any order; reads are those of a dict."""

    @initialize(
        base=st.dictionaries(st.sampled_from(SUFFIXES), st.binary(max_size=3)),
        layers=st.lists(st.dictionaries(st.sampled_from(SUFFIXES), VALUES), max_size=2),
        on_disk=st.booleans(),
    )
    def begin(
        self, base: dict[bytes, bytes], layers: list[dict[bytes, bytes | None]], on_disk: bool
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="spill-"))
        self.spill = spill_in(self.folder / "overlay")
        self.base = MemoryBase()
        self.truth: dict[bytes, bytes] = {}
        self.open = []
        self.epoch = len(layers)
        self._take({PREFIXES[0] + key: value for key, value in base.items()})
        self.base.entries = dict(self.truth)
        self.table = StateTable(self.base, spill=self.spill)
        for epoch, layer in enumerate(layers):
            changes = {PREFIXES[epoch] + key: value for key, value in layer.items()}
            self._take(changes)
            rows = rows_of(changes)
            self.open.append(self.table.add_layer(epoch, [rows] if on_disk else rows))

    def _take(self, changes: dict[bytes, bytes | None]) -> None:
        for key, value in changes.items():
            if value is None:
                self.truth.pop(key, None)
            else:
                self.truth[key] = value

    @rule(prefix=st.sampled_from(PREFIXES), suffix=st.sampled_from(SUFFIXES), value=VALUES)
    def put(self, prefix: bytes, suffix: bytes, value: bytes | None) -> None:
        self.table.put_under(prefix, prefix + suffix, value)
        self._take({prefix + suffix: value})

    @rule(
        prefix=st.sampled_from(PREFIXES),
        changes=st.dictionaries(st.sampled_from(SUFFIXES), VALUES, min_size=5),
    )
    def put_many(self, prefix: bytes, changes: dict[bytes, bytes | None]) -> None:
        for suffix, value in changes.items():
            self.put(prefix, suffix, value)

    @rule()
    def relieve(self) -> None:
        self.table.relieve()
        assert not self.table.entries

    @rule()
    def freeze(self) -> None:
        self.epoch += 1
        self.open.append(self.table.freeze(self.epoch))

    @rule()
    def apply(self) -> None:
        if not self.open:
            return
        oldest = self.open.pop(0)
        keys, values = oldest.sorted()
        assert len(keys) == len(oldest)
        self.base.apply(keys, values)
        self.table.applied(oldest)

    @invariant()
    def reads_are_those_of_the_dict(self) -> None:
        if not hasattr(self, "table"):
            return
        keys = [prefix + suffix for prefix in PREFIXES for suffix in SUFFIXES]
        assert self.table.multi_get(keys) == [self.truth.get(key) for key in keys]
        assert self.table.multi_get(keys[::-7]) == [self.truth.get(key) for key in keys[::-7]]
        for at in range(0, len(keys), 3):
            some = keys[at : at + 1 + at % 2]
            assert self.table.multi_get(some) == [self.truth.get(key) for key in some]
        for key in keys[::5]:
            assert self.table.get(key) == self.truth.get(key)
        for prefix in PREFIXES[:2]:  # of the others one is a prefix of the other
            expected = sorted(item for item in self.truth.items() if item[0].startswith(prefix))
            assert self.table.scan(prefix) == expected
        assert list(self.table.snapshot()) == sorted(self.truth.items())

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.spill.close()
            assert not list(self.folder.iterdir())
            shutil.rmtree(self.folder)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_module, "_BLOCK_ROWS", 3)
    monkeypatch.setattr(spill_module, "_CACHED_BLOCKS", 2)
    monkeypatch.setattr(spill_module, "_HELD_ROWS", 5)
    monkeypatch.setattr(blocks_module, "_SEARCH_ROWS", 2)
    monkeypatch.setattr(blocks_module, "_MATCHED_KEYS", 4)


class TestTable(Table.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=60, stateful_step_count=25, deadline=None)

    @pytest.fixture(autouse=True)
    def small(self, small_blocks: None) -> None:
        """Blocks of three rows in the machine too."""


@settings(max_examples=100, deadline=None)
@given(st.lists(CHANGES, max_size=4))
def test_a_merge_gives_every_key_once_with_its_newest_value(
    layers: list[dict[bytes, bytes | None]],
) -> None:
    expected: dict[bytes, bytes | None] = {}
    runs = []
    for layer in layers:
        expected.update(layer)
        rows = rows_of(layer)
        cuts = [
            SortedRows(rows.keys.slice(i, 4), rows.values.slice(i, 4))
            for i in range(0, len(rows), 4)
        ]
        runs.append(Run.in_memory(cuts))
    found = [
        pair
        for keys, values in merge(runs)
        for pair in zip(keys.to_pylist(), values.to_pylist(), strict=True)
    ]
    assert found == sorted(expected.items())
    assert count_merged(runs) == len(expected)


@settings(max_examples=100, deadline=None)
@given(CHANGES, st.lists(st.binary(max_size=3), max_size=60))
def test_sorted_rows_are_found_one_by_one_and_together(
    changes: dict[bytes, bytes | None], asked: list[bytes]
) -> None:
    padded = rows_of({b"": b"", **{b"\0" + key: value for key, value in changes.items()}})
    rows = SortedRows(padded.keys.slice(1), padded.values.slice(1))
    wanted = [b"\0" + key for key in asked]
    expected = [changes.get(key, ABSENT) for key in asked]
    assert [rows.get(key) for key in wanted] == expected
    assert (rows.get_many(wanted) if wanted else []) == expected
    scanned = Run.in_memory([rows]).scan(b"\0", b"\1")
    assert list(scanned) == [(b"\0" + k, changes[k]) for k in sorted(changes)]


def test_an_overlay_is_spilled_only_over_its_limit(tmp_path: Path) -> None:
    table = StateTable(MemoryBase(), spill=spill_in(tmp_path / "o", limit_bytes=100_000))
    for n in range(1000):
        table.put(n.to_bytes(4, "big"), b"v" * 1000)
        table.relieve()
        assert len(table.entries) < 110
    assert table.freeze(0).spilled
    assert len(list((tmp_path / "o").iterdir())) == 11
    for n in range(300):  # of the next epoch: what went before does not count
        table.put(n.to_bytes(4, "big"), b"")
        table.relieve()
    assert len(table.entries) == 300


def test_the_gauge_is_close_to_what_entries_take() -> None:
    entries: dict[bytes, bytes | None] = {}
    gauge = OverlayGauge()
    for n in range(5000):
        entries[n.to_bytes(8, "big")] = b"v" * (n % 100) if n % 10 else None
        if n % 700 == 0:
            gauge.look(entries, listed=False)
    expected = sum(len(k) + len(v or b"") + 166 for k, v in entries.items())
    assert 0.8 < gauge.look(entries, listed=False) / expected < 1.2


def test_without_a_spill_or_over_no_limit_nothing_is_written(tmp_path: Path) -> None:
    spill = spill_in(tmp_path / "o", limit_bytes=1 << 20)
    for table in (StateTable(MemoryBase()), StateTable(MemoryBase(), spill=spill)):
        table.put(b"k", b"v")
        table.relieve()
        assert table.entries == {b"k": b"v"}
        assert not table.freeze(0).spilled
    spill.close()
    assert not list(tmp_path.iterdir())


def test_the_runs_of_an_applied_overlay_are_removed(tmp_path: Path) -> None:
    table = StateTable(MemoryBase(), spill=spill_in(tmp_path / "o"))
    table.put(b"k", b"v")
    table.relieve()
    frozen = table.freeze(0)
    table.put(b"k", b"w")
    table.relieve()
    assert len(list((tmp_path / "o").iterdir())) == 2
    table.applied(frozen)
    assert len(list((tmp_path / "o").iterdir())) == 1
    assert table.get(b"k") == b"w"


def test_a_decoded_delta_is_a_layer(tmp_path: Path) -> None:
    base = MemoryBase()
    base.apply([b"a", b"b", b"c"], [b"1", b"2", b"3"])
    table = StateTable(base)
    layer = table.add_layer(7, decode_delta(encode_delta([b"a", b"b"], [None, b"new"]).data))
    table.put(b"c", None)
    assert table.multi_get([b"a", b"b", b"c"]) == [None, b"new", None]
    assert layer.epoch == 7
    assert len(layer) == 2
    base.apply(*layer.sorted())
    table.applied(layer)
    assert dict(table.snapshot()) == {b"b": b"new"}


def test_a_disk_that_fails_is_named_and_the_overlay_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    table = StateTable(MemoryBase(), spill=spill_in(tmp_path / "file" / "under"))
    table.put(b"k", b"v")
    with pytest.raises(LocalDirError, match="file"):
        table.relieve()
    assert table.get(b"k") == b"v"


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_run_is_an_error_and_never_a_wrong_value(tmp_path: Path, damage: str) -> None:
    table = StateTable(MemoryBase(), spill=spill_in(tmp_path / "o"))
    table.put(b"k", b"v" * 500)
    table.relieve()
    (path,) = (tmp_path / "o").iterdir()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data if damage == "flipped" else data[:-1])
    with pytest.raises(LocalDirError, match="run-0"):
        table.get(b"k")
    with pytest.raises(LocalDirError, match="run-0"):
        list(table.freeze(0).merged())


def test_a_layer_that_comes_in_blocks_goes_to_disk_only_if_it_is_large(tmp_path: Path) -> None:
    changes: dict[bytes, bytes | None] = {b"%04d" % n: b"v" * 100 for n in range(1000)}
    rows = rows_of(changes)
    blocks = [
        SortedRows(rows.keys.slice(at, 100), rows.values.slice(at, 100))
        for at in range(0, 1000, 100)
    ]
    for limit_bytes, files in ((1 << 20, 0), (1 << 16, 1), (0, 1)):
        spill = spill_in(tmp_path / "o", limit_bytes=limit_bytes)
        table = StateTable(MemoryBase(), spill=spill)
        table.add_layer(1, iter(blocks))
        assert len(list((tmp_path / "o").glob("*"))) == files
        assert dict(table.snapshot()) == changes
        assert table.multi_get(sorted(changes)) == [changes[key] for key in sorted(changes)]
        spill.close()
