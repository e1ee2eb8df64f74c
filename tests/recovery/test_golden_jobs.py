"""Jobs that earlier releases wrote: every one restores, and goes on, also with other schemas."""

from __future__ import annotations

import datetime
import shutil
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import Row

from recovery.inspect.verify import verify
from snapshot.formats.record import Manifest
from snapshot.storage.stores_by_uri import open_store
from statebackend import system
from statebackend.api.arrow import ArrowProcessor
from statebackend.errors import StateMismatchError
from statebackend.key_hashing import key_groups
from statebackend.keygroups import subtask_of
from statebackend.runtime.worker import operator_state_io as operatorstate
from statebackend.state.ttl_cells import TTL
from tests.support.golden import (
    EPOCHS,
    EVOLVED_FROM,
    LATER_MS,
    RESCALED_FROM,
    WEEK,
    Changed,
    Kept,
    Seen,
    Shared,
    Wider,
    keys_of,
    values_of,
)
from tests.support.inprocess import MAX_PARALLELISM, STAMP_MS, InProcessJob

GOLDEN = Path(__file__).parents[1] / "golden" / "jobs"
LOOK = [(key, -1) for key in range(10)]


class Again(Changed):
    """Two more changes on top of those of the golden job."""

    value = "n decimal(19,0), word string, since date DEFAULT '2026-01-01'"
    element = "note string, v decimal(21,2)"
    entry = "n bigint, at struct<y: int DEFAULT 1, x: bigint>"

    def made_value(self, v: int) -> Any:
        return Decimal(v), "again", None

    def made_element(self, v: int) -> Any:
        return "again", Decimal(v)

    def made_entry(self, v: int) -> Any:
        return v, None


class Narrow(Changed):
    value = "word string, m int, n int"


def opened(name: str, folder: Path) -> InProcessJob:
    """A copy of a golden job, to go on with."""
    shutil.copytree(GOLDEN / name, folder / "store")
    if name == "format1":
        return InProcessJob(folder, name="bench")
    return InProcessJob(folder, time_mode="processing")


def newest(job: InProcessJob) -> Manifest:
    return job.log.manifests()[-1]


def first_format(key: int) -> Any:
    seen = values_of(key)
    words = [f"w{v % 3}" for v in seen]
    return (len(seen), words[-1], None), seen, {w: words.count(w) for w in sorted(set(words))}


def kept(key: int) -> Any:
    seen = values_of(key)
    last = (seen[-1], f"w{seen[-1]}", 0.5)
    return (
        [last, last, (max(seen),)],
        [[(v,) for v in seen]] * 2,
        [{f"w{v}": (v,) for v in seen}] * 2,
        [STAMP_MS + LATER_MS],
    )


def changed(key: int, changed_from: int) -> Any:
    seen = values_of(key)
    is_new = seen[-1] >= changed_from
    last = (f"w{seen[-1]}", 8 if is_new else 7, seen[-1])
    elements = [(v, "new" if v >= changed_from else None) for v in seen]
    entries = {f"w{v}": (Row(x=v) if v >= changed_from else None, v) for v in seen}
    timers = [STAMP_MS + LATER_MS]
    return [last, last, (max(seen),)], [elements] * 2, [entries] * 2, timers


def looked(expected: Any, *more: Any) -> list[tuple[int, str]]:
    return sorted((key, repr(expected(key, *more))) for key in range(10))


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_a_golden_job_is_of_the_format_that_it_is_named_by(name: str, tmp_path: Path) -> None:
    job = opened(name, tmp_path)
    job.start({"format1": Seen(), "format3": Shared()}.get(name, Changed()))
    records = [one for one in job.log.manifests() if one.kind == "checkpoint"]
    assert {one.format for one in records} == {int(name[6])}
    assert records[-1].epoch == EPOCHS - 1
    assert job.epoch == EPOCHS


def test_format_1_restores(tmp_path: Path) -> None:
    job = opened("format1", tmp_path)
    job.start(Seen())
    found = [(key, eval(text)) for key, text in job.run(LOOK)]
    expected = [(key, first_format(key)) for key in range(10)]
    shown = [(key, (last, [v for (v,) in rows], times)) for key, (last, rows, times) in found]
    assert [(k, (a, b, {w: n for w, (n,) in c.items()})) for k, (a, b, c) in sorted(shown)] == (
        expected
    )


def test_format_1_goes_on_with_other_schemas(tmp_path: Path) -> None:
    job = opened("format1", tmp_path)
    job.start(Wider())
    found = {key: eval(text, {"Decimal": Decimal}) for key, text in job.run(LOOK)}
    for key in range(10):
        (n, word, _), seen, times = first_format(key)
        assert found[key] == (
            (word, Decimal(n), "x"),
            [(Decimal(v), None) for v in seen],
            {w: (count,) for w, count in times.items()},
        )


def test_format_2_before_schemas_changed_restores(tmp_path: Path) -> None:
    job = opened("format2", tmp_path)
    job.start(Kept())
    assert sorted(job.run(LOOK)) == looked(kept)
    assert all("earlier" not in schema for schema in newest(job).schemas.values())


def test_format_2_goes_on_with_other_schemas(tmp_path: Path) -> None:
    job = opened("format2", tmp_path)
    job.start(Changed())
    assert sorted(job.run(LOOK)) == looked(changed, EPOCHS)
    assert all("earlier" in schema for name, schema in newest(job).schemas.items() if name)


class Columns(ArrowProcessor):
    """The states of `Changed` with a TTL, or those without, by the column."""

    def __init__(self, ttl: TTL | None) -> None:
        self.ttl, self.suffix = ttl, "" if ttl is None else "_ttl"

    def open(self, ctx: Any) -> None:
        suffix, ttl = self.suffix, self.ttl
        self.last = ctx.value_state(f"last{suffix}", Changed.value, ttl=ttl)
        self.all = ctx.list_state(f"all{suffix}", Changed.element, ttl=ttl)
        self.times = ctx.map_state(f"times{suffix}", "word string", Changed.entry, ttl=ttl)

    def process(self, batch: pa.RecordBatch, ctx: Any) -> Any:
        last = [tuple(row.values()) for row in self.last.get(ctx.keys).to_pylist()]
        index, rows = self.all.get(ctx.keys)
        elements = _by_key(index, [tuple(row.values()) for row in rows.to_pylist()], ctx)
        index, words, rows = self.times.items(ctx.keys)
        entries = [
            (word["word"], (row["at"] and row["at"]["x"], row["n"]))
            for word, row in zip(words.to_pylist(), rows.to_pylist(), strict=True)
        ]
        seen = last, elements, _by_key(index, entries, ctx)
        shown = [repr(one) for one in zip(*seen, strict=True)]
        return pa.record_batch([ctx.keys.columns.column(0), pa.array(shown)], ["k", "seen"])


def _by_key(index: Any, rows: list[Any], ctx: Any) -> list[list[Any]]:
    return [
        [row for i, row in zip(index, rows, strict=True) if i == key]
        for key in range(len(ctx.keys))
    ]


@pytest.mark.parametrize(
    ("name", "changed_from"), [("format2", EPOCHS), ("format2-evolved", EVOLVED_FROM)]
)
@pytest.mark.parametrize("ttl", [None, WEEK], ids=["plain", "ttl"])
def test_columns_of_state_hold_rows_of_every_schema(
    name: str, changed_from: int, ttl: TTL | None, tmp_path: Path
) -> None:
    job = opened(name, tmp_path)
    job.start(Columns(ttl), allow_dropped_state=True)
    found = dict(job.run(LOOK))
    for key in range(10):
        (last, _, _), (elements, _), (entries, _), _ = changed(key, changed_from)
        plain = [(word, (at and at.x, n)) for word, (at, n) in entries.items()]
        assert eval(found[key]) == (last, elements, plain)


def test_format_2_with_rows_of_two_schemas_restores(tmp_path: Path) -> None:
    job = opened("format2-evolved", tmp_path)
    job.start(Changed())
    assert sorted(job.run(LOOK)) == looked(changed, EVOLVED_FROM)


def test_a_job_changes_again_and_again_and_is_restored_from_the_log_alone(tmp_path: Path) -> None:
    job = opened("format2-evolved", tmp_path)
    job.start(Again())
    job.run([(key, EPOCHS) for key in keys_of(EPOCHS)])
    shutil.rmtree(tmp_path / "local")
    job.start(Again())
    found = dict(job.run(LOOK))
    for key in range(10):
        seen = values_of(key, EPOCHS + 1)
        values, lists, maps, _ = eval(
            found[key], {"Decimal": Decimal, "Row": Row, "datetime": datetime}
        )
        by = [_again(v) for v in seen]
        assert values[0] == values[1] == by[-1][0]
        assert lists == [[one[1] for one in by]] * 2
        assert maps == [{f"w{v}": one[2] for v, one in zip(seen, by, strict=True)}] * 2
    assert len(job.specs["op"].versions["last"]) == 3


def _again(v: int) -> tuple[Any, Any, Any]:
    """What the three states hold of a value that was written at its own time."""
    if v == EPOCHS:
        return (Decimal(v), "again", None), ("again", Decimal(v)), (v, None)
    note = "new" if v >= EVOLVED_FROM else None
    at = Row(y=1, x=v) if v >= EVOLVED_FROM else None
    return (Decimal(v), f"w{v}", datetime.date(2026, 1, 1)), (note, Decimal(v)), (v, at)


@pytest.mark.parametrize("name", ["format2-evolved"])
def test_an_impossible_change_is_refused_and_writes_nothing(name: str, tmp_path: Path) -> None:
    job = opened(name, tmp_path)
    job.start(Changed())
    before = len(job.log.manifests())
    with pytest.raises(
        StateMismatchError, match="field 'n' is bigint in the checkpoint and int now"
    ):
        job.start(Narrow())
    assert len(job.log.manifests()) == before
    assert sorted(job.run(LOOK)) == looked(changed, EVOLVED_FROM)


# --- format 3: state of no key, and an operator that was rescaled --------------------------------


class SharedChanged(Shared):
    """The same with a wider rule."""

    rule = "cents decimal(20,0), by string DEFAULT 'x'"

    def made_rule(self, cents: int) -> Any:
        return Decimal(cents), "new"


def pairs(*epochs: int) -> list[tuple[int, int]]:
    return sorted((key, epoch) for epoch in epochs for key in keys_of(epoch))


def shared(job: InProcessJob, parallelism: int) -> dict[int, list[Any]]:
    """By subtask, what each key sees; the keys' own state is checked."""
    found: dict[int, list[Any]] = {subtask: [] for subtask in range(parallelism)}
    for key, text in job.run(LOOK):
        (last, elements), lists, rules = eval(text, {"Decimal": Decimal})
        seen = values_of(key)
        assert last == (seen[-1], f"w{seen[-1]}")
        assert elements == [(v,) for v in seen]
        (group,) = key_groups([pa.array([key])], MAX_PARALLELISM).tolist()
        found[subtask_of(group, parallelism, MAX_PARALLELISM)].append((lists, rules))
    for subtask, one in found.items():
        assert one, f"no key of subtask {subtask} was looked at"
        assert all(each == one[0] for each in one)
    return {subtask: one[0] for subtask, one in found.items()}


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has seen nothing of such a job."""
    monkeypatch.setattr(operatorstate, "_of_process", operatorstate.KeptBlobs())


BEFORE, SINCE = range(RESCALED_FROM), range(RESCALED_FROM, EPOCHS)


@pytest.mark.usefixtures("new_process")
@pytest.mark.parametrize("parallelism", [1, 2, 3, 5])
def test_format_3_restores_at_any_parallelism(parallelism: int, tmp_path: Path) -> None:
    job = opened("format3", tmp_path)
    job.start(Shared(), parallelism=parallelism)
    found = shared(job, parallelism)
    rules = [((f"w{e}",), (e,)) for e in range(1, EPOCHS)]
    assert [one[1] for one in found.values()] == [rules] * parallelism
    mine = [one[0][0] for one in found.values()]
    assert sorted(pair for rows in mine for pair in rows) == pairs(*BEFORE, *SINCE)
    if parallelism != 3:  # dealt out once more
        assert max(map(len, mine)) - min(map(len, mine)) <= 1
    own = [Counter(one[0][1]) for one in found.values()]
    since = sum(own, Counter()) - Counter(pairs(*BEFORE) * 3)
    if parallelism == 3:  # each has what all had before, and its own
        assert since == Counter(pairs(*SINCE))
    else:  # each has what each of the three had
        assert own == [Counter(pairs(*BEFORE) * 3 + pairs(*SINCE))] * parallelism


@pytest.mark.usefixtures("new_process")
def test_format_3_goes_on_with_another_schema_and_is_restored_again(tmp_path: Path) -> None:
    job = opened("format3", tmp_path)
    job.start(SharedChanged(), parallelism=3)
    job.run([], [("new", 5)])
    shutil.rmtree(tmp_path / "local")
    operatorstate._of_process = operatorstate.KeptBlobs()
    job.start(SharedChanged(), parallelism=2)
    rules = [(("new",), (Decimal(5), "new"))]
    rules += [((f"w{e}",), (Decimal(e), "x")) for e in range(1, EPOCHS)]
    assert [one[1] for one in shared(job, 2).values()] == [rules] * 2


@pytest.mark.usefixtures("new_process")
def test_format_3_holds_what_it_is_there_for(tmp_path: Path) -> None:
    job = opened("format3", tmp_path)
    job.start(Shared(), parallelism=3)
    slices = [(m, entry) for m in job.log.manifests() for entry in m.slices]
    kinds = {(entry.kind, entry.object is not None) for _, entry in slices}
    assert {("operator", True), ("operator", False), ("broadcast", True), ("base", True)} <= kinds
    assert {m.parallelism for m, _ in slices} == {2, 3}
    assert not [m for m, entry in slices if entry.kind == "base" and m.parallelism == 3]
    store = open_store(str(tmp_path / "store"), new_id=system.new_id)
    assert verify(store, "job").ok
