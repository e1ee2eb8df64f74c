"""State read as tables: every kind and format, at any parallelism, by key and by epoch."""

from __future__ import annotations

import shutil
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T

import statebackend
from statebackend.errors import NotRestorableError, SettingError, UsageError
from statebackend.tables import state_scan as scan
from statebackend.tables.wanted_keys import encoded_keys
from tests.support.golden import EPOCHS, LATER_MS, WEEK, Kept, keys_of, values_of
from tests.support.inprocess import STAMP_MS, InProcessJob

GOLDEN = Path(__file__).parents[1] / "golden" / "jobs"
JOB = "job"


def job_of(folder: Path, **settings: Any) -> InProcessJob:
    """A job whose folder is where a job named `JOB` under the folder has its own."""
    job = InProcessJob(folder / "run", name=JOB, time_mode="processing", **settings)
    (folder / "run" / "store").mkdir(parents=True)
    (folder / JOB).symlink_to(folder / "run" / "store")
    return job


def run_kept(folder: Path, *, epochs: int = EPOCHS, **settings: Any) -> InProcessJob:
    job = job_of(folder, **settings)
    job.start(Kept())
    for epoch in range(epochs):
        job.run([(key, epoch) for key in keys_of(epoch)])
    return job


def golden(name: str, folder: Path) -> Path:
    shutil.copytree(GOLDEN / name, folder / ("bench" if name == "format1" else JOB))
    return folder


def table(folder: Path, operator: str, state: str, **given: Any) -> pa.Table:
    job = given.pop("job", JOB)
    return statebackend.read_state(f"file://{folder}", job, operator, state, **given).read_all()


def by_key(found: pa.Table, column: str = "value") -> dict[int, Any]:
    rows: dict[int, list[Any]] = defaultdict(list)
    for row in found.to_pylist():
        rows[row["key"]["k"]].append(tuple(row[column].values()))
    return dict(rows)


def test_a_value_state_has_a_row_for_each_key(tmp_path: Path) -> None:
    run_kept(tmp_path)
    found = table(tmp_path, "op", "last")
    assert found.schema.names == ["key_group", "key", "value"]
    assert found.schema.field("value").type == pa.struct(
        [("n", pa.int32()), ("word", pa.string()), ("gone", pa.float64())]
    )
    last = {k: values_of(k)[-1] for k in range(10)}
    assert by_key(found) == {k: [(n, f"w{n}", 0.5)] for k, n in last.items()}
    assert found.column("key_group").to_pylist() == sorted(found.column("key_group").to_pylist())


def test_a_list_state_has_a_row_for_each_element_in_their_order(tmp_path: Path) -> None:
    run_kept(tmp_path)
    for name in ("all", "all_ttl"):
        found = table(tmp_path, "op", name)
        assert by_key(found) == {k: [(v,) for v in values_of(k)] for k in range(10)}
    index = by_key(table(tmp_path, "op", "all", columns=["key", "value"]))
    assert index.keys() == set(range(10))
    rows = table(tmp_path, "op", "all").select(["key", "index"]).to_pylist()
    for key in range(10):
        own = [row["index"] for row in rows if row["key"]["k"] == key]
        assert own == list(range(len(values_of(key))))


def test_a_map_state_has_a_row_for_each_entry(tmp_path: Path) -> None:
    run_kept(tmp_path)
    for name in ("times", "times_ttl"):
        found = table(tmp_path, "op", name)
        entries: dict[int, dict[str, int]] = defaultdict(dict)
        for row in found.to_pylist():
            entries[row["key"]["k"]][row["map_key"]["word"]] = row["value"]["n"]
        assert entries == {k: {f"w{v}": v for v in values_of(k)} for k in range(10)}


def test_a_reducing_state_is_a_value(tmp_path: Path) -> None:
    run_kept(tmp_path)
    found = table(tmp_path, "op", "most")
    assert by_key(found) == {k: [(max(values_of(k)),)] for k in range(10)}


@pytest.mark.parametrize("name", ["last_ttl", "times_ttl", "all_ttl"])
def test_a_ttl_is_a_column(tmp_path: Path, name: str) -> None:
    run_kept(tmp_path)
    found = table(tmp_path, "op", name)
    expected = {STAMP_MS + 1000 * epoch + WEEK.ms for epoch in range(EPOCHS)}
    times = set(found.column("expires_at_ms").to_pylist())
    assert times <= expected
    assert max(times) == max(expected)


def test_timers_are_a_table(tmp_path: Path) -> None:
    run_kept(tmp_path)
    found = statebackend.read_timers(f"file://{tmp_path}", JOB, "op").read_all()
    rows = {(row["key"]["k"], row["at_ms"]) for row in found.to_pylist()}
    assert rows == {(k, STAMP_MS + LATER_MS) for k in range(10)}


def test_timers_of_some_keys_are_theirs_alone(tmp_path: Path) -> None:
    run_kept(tmp_path)
    place = (f"file://{tmp_path}", JOB, "op")
    every = statebackend.read_timers(*place).read_all().to_pylist()
    for key in range(10):
        found = statebackend.read_timers(*place, keys=[key]).read_all().to_pylist()
        assert found == [row for row in every if row["key"]["k"] == key]
    assert statebackend.read_timers(*place, keys=[99]).read_all().num_rows == 0


def test_some_keys_give_their_rows_and_no_others(tmp_path: Path) -> None:
    run_kept(tmp_path)
    for keys in ([3, 7, 99], [(3,), (7,)], [{"k": 3}, {"k": 7}], pa.table({"k": [7, 3]})):
        found = table(tmp_path, "op", "all", keys=keys)
        assert by_key(found) == {k: [(v,) for v in values_of(k)] for k in (3, 7)}
    assert table(tmp_path, "op", "all", keys=[]).num_rows == 0


@pytest.mark.parametrize("keys", ["3", 3, [("a", "b")], ["a"], [{"x": 1}]])
def test_what_is_no_key_is_refused(tmp_path: Path, keys: Any) -> None:
    run_kept(tmp_path, epochs=1)
    with pytest.raises(UsageError, match="keys="):
        table(tmp_path, "op", "all", keys=keys)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (1.5, T.LongType()),
        (datetime(2026, 1, 1, 23), T.DateType()),
        (datetime(2026, 1, 1, 23), T.TimestampType()),
    ],
)
def test_a_key_is_never_cut_to_its_columns_type(given: Any, kind: T.DataType) -> None:
    schema = T.StructType([T.StructField("k", kind)])
    with pytest.raises(UsageError, match="would be taken for"):
        encoded_keys([given], schema, 128)


def test_keys_are_taken_as_reading_gives_them() -> None:
    schema = T.StructType([T.StructField("a", T.LongType()), T.StructField("b", T.StringType())])
    plain = pa.table({"b": ["x", "y"], "a": [1, 2], "other": [0, 0]})
    column = pa.table({"key": [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]})
    expected = encoded_keys([(1, "x"), (2, "y")], schema, 128)
    assert encoded_keys(plain, schema, 128) == encoded_keys(column, schema, 128) == expected
    assert encoded_keys(plain.to_batches()[0], schema, 128) == expected
    with pytest.raises(UsageError, match="keys= has the columns a"):
        encoded_keys(plain.select(["a"]), schema, 128)


def test_batches_have_a_limit_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_kept(tmp_path)
    monkeypatch.setattr(scan, "BATCH_BYTES", 200)
    found = statebackend.read_state(tmp_path.as_uri(), JOB, "op", "all")
    sizes = [batch.num_rows for batch in found]
    assert len(sizes) > 3
    assert sum(sizes) == table(tmp_path, "op", "all").num_rows


def test_columns_and_fields_are_taken_by_name(tmp_path: Path) -> None:
    run_kept(tmp_path)
    found = table(tmp_path, "op", "last", columns=["value.n", "key.k"])
    assert found.schema.names == ["value.n", "key.k"]
    assert sorted(zip(*found.to_pydict().values(), strict=True)) == sorted(
        (values_of(k)[-1], k) for k in range(10)
    )
    with pytest.raises(SettingError, match=r"no column 'value.x'.* value\.word"):
        table(tmp_path, "op", "last", columns=["value.x"])


@pytest.mark.parametrize("epoch", range(EPOCHS))
def test_an_epoch_that_is_retained_is_read_as_it_was(tmp_path: Path, epoch: int) -> None:
    run_kept(tmp_path, base_every_epochs=2, retain_epochs=EPOCHS)
    found = table(tmp_path, "op", "all", epoch=epoch)
    expected = {k: [(v,) for v in values_of(k, epoch + 1)] for k in range(10)}
    assert by_key(found) == {k: rows for k, rows in expected.items() if rows}


def test_an_epoch_that_never_was_is_refused(tmp_path: Path) -> None:
    run_kept(tmp_path, epochs=2)
    with pytest.raises(NotRestorableError, match=r"epoch 17 .* Give an epoch that the job retains"):
        table(tmp_path, "op", "all", epoch=17)


def test_rows_of_earlier_schemas_come_in_the_newest(tmp_path: Path) -> None:
    found = table(golden("format2-evolved", tmp_path), "op", "last")
    assert found.schema.field("value").type == pa.struct(
        [("word", pa.string()), ("m", pa.int32()), ("n", pa.int64())]
    )
    last = {k: values_of(k)[-1] for k in range(10)}
    assert by_key(found) == {k: [(f"w{n}", 8 if n >= 3 else 7, n)] for k, n in last.items()}


def test_a_job_of_the_first_format_is_read(tmp_path: Path) -> None:
    found = table(golden("format1", tmp_path), "op", "all", job="bench")
    assert by_key(found) == {k: [(v,) for v in values_of(k)] for k in range(10)}


def test_state_of_no_key_is_read_by_subtask(tmp_path: Path) -> None:
    golden("format3", tmp_path)
    expected = sorted((k, v) for k in range(10) for v in values_of(k))
    for name in ("mine", "everybodys"):
        found = table(tmp_path, "op", name)
        assert found.schema.names == ["subtask", "index", "value"]
        rows = {tuple(row["value"].values()) for row in found.to_pylist()}
        assert sorted(rows) == expected
    assert by_key(table(tmp_path, "op", "all")) == {
        k: [(v,) for v in values_of(k)] for k in range(10)
    }
    rules = table(tmp_path, "op", "rules").to_pylist()
    assert {row["map_key"]["word"]: row["value"]["cents"] for row in rules} == {
        f"w{e}": e for e in range(1, EPOCHS)
    }
    with pytest.raises(SettingError, match="belongs to no key"):
        table(tmp_path, "op", "rules", keys=[1])


@pytest.mark.parametrize("after", [2, 5])
def test_state_is_read_right_after_a_change_of_parallelism(tmp_path: Path, after: int) -> None:
    job = job_of(tmp_path)
    job.start(Kept(), parallelism=3)
    for epoch in range(3):
        job.run([(key, epoch) for key in keys_of(epoch)])
    job.start(Kept(), parallelism=after)
    for epoch in range(3, EPOCHS):
        job.run([(key, epoch) for key in keys_of(epoch)])
        expected = {k: [(v,) for v in values_of(k, epoch + 1)] for k in range(10)}
        assert by_key(table(tmp_path, "op", "all")) == expected
        assert by_key(table(tmp_path, "op", "all", keys=[4])) == {4: expected[4]}


def test_the_states_of_a_job_are_listed(tmp_path: Path) -> None:
    run_kept(tmp_path)
    found = {
        row["state"]: row for row in statebackend.states(f"file://{tmp_path}", JOB).to_pylist()
    }
    assert found.keys() == {"last", "last_ttl", "all", "all_ttl", "times", "times_ttl", "most"}
    assert found["times_ttl"]["kind"] == "map"
    assert found["times_ttl"]["ttl_ms"] == WEEK.ms
    assert found["times_ttl"]["map_key_schema"] == "word string"
    assert found["last"]["value_schema"] == "n int, word string, gone double"
    assert found["last"]["key_schema"] == "k bigint"
    assert found["last"]["epoch"] == EPOCHS - 1
    assert found["last"]["operator_bytes"] > 0


@pytest.mark.parametrize(
    ("operator", "state", "said"),
    [("other", "last", "no operator 'other'.* 'op'"), ("op", "x", "no state 'x'.* 'last_ttl'")],
)
def test_a_name_that_is_not_there_is_refused_with_those_that_are(
    tmp_path: Path, operator: str, state: str, said: str
) -> None:
    run_kept(tmp_path, epochs=1)
    with pytest.raises(SettingError, match=said):
        table(tmp_path, operator, state)


def test_a_job_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotRestorableError, match="no job"):
        table(tmp_path, "op", "last")


def test_nothing_is_left_in_the_scratch_folder_however_far_it_is_read(tmp_path: Path) -> None:
    run_kept(tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    reader = statebackend.read_state(
        f"file://{tmp_path}", JOB, "op", "last", scratch_dir=str(scratch)
    )
    assert list(scratch.iterdir())
    del reader
    assert not list(scratch.iterdir())
    table(tmp_path, "op", "last", scratch_dir=str(scratch))
    assert not list(scratch.iterdir())
