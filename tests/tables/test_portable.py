"""Savepoints as Parquet files and back: nothing is lost, and other tools read them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

import statebackend
from recovery.savepoints.verify_savepoint import verify_savepoint
from snapshot.storage.stores_by_uri import open_store
from statebackend import TTL, OperatorState, system
from statebackend.errors import (
    CorruptionError,
    NotRestorableError,
    SettingError,
    UnsupportedFormatError,
)
from tests.schema.strategies import tables, to_arrow, types
from tests.support.begun_jobs import begun, location, saved
from tests.support.golden import EPOCHS, Kept, Shared, keys_of
from tests.support.inprocess import InProcessJob

GOLDEN = Path(__file__).parents[1] / "golden" / "portable1"


def there_and_back(savepoint: str, folder: Path) -> str:
    statebackend.export_savepoint(savepoint, f"file://{folder}/exported")
    statebackend.import_savepoint(f"file://{folder}/exported", f"file://{folder}/back")
    return f"file://{folder}/back"


def everything(savepoint: str) -> dict[str, Any]:
    """All that can be read of a savepoint, but for the indexes of lists, which have gaps."""
    said = statebackend.states("", savepoint=savepoint).drop(["operator_bytes"]).to_pylist()
    found: dict[str, Any] = {"states": sorted(map(repr, said))}
    last = statebackend.epochs("", savepoint=savepoint).to_pylist()[-1]
    found["epoch"] = {name: value for name, value in last.items() if name != "stamp_ms"}
    for row in said:
        name = row["operator"], row["state"]
        table = statebackend.read_state("", None, *name, savepoint=savepoint).read_all()
        found[repr(name)] = [table.schema, repr(table.to_pylist())]
    for uid in {row["operator"] for row in said if row["key_schema"]}:
        timers = statebackend.read_timers("", None, uid, savepoint=savepoint).read_all()
        found[f"timers of {uid}"] = repr(timers.to_pylist())
    return found


@pytest.mark.parametrize("processor", [Kept, Shared])
def test_a_job_goes_on_from_what_was_exported_and_imported(tmp_path: Path, processor: Any) -> None:
    mode = "none" if processor is Shared else "processing"
    job = InProcessJob(tmp_path, time_mode=mode)
    job.start(processor(), parallelism=2)
    for epoch in range(EPOCHS):
        job.run([(key, epoch) for key in keys_of(epoch)], [("a", 1)] * (processor is Shared))
    first = saved(tmp_path, job)
    back = there_and_back(first, tmp_path)
    assert everything(back) == everything(first)
    assert verify_savepoint(open_store(back, new_id=system.new_id)).ok
    clone = begun(back, tmp_path / "clone", time_mode=mode)
    clone.start(processor(), parallelism=2)
    looks = [(key, -1) for key in range(10)]
    assert sorted(clone.run(looks)) == sorted(job.run(looks))


def made(folder: Path, name: str = "saved") -> str:
    """A savepoint with a state of every kind, and where sources stood."""
    ends = pa.array([1_000, 2_000])
    count = pa.table({"user": ["ann", "bob"], "n": [1, 2]})
    pages = pa.table({"user": ["ann", "bob"], "map_key": [{"page": "/"}] * 2, "n": [3, 4]})
    visits = pa.table({"user": ["ann", "ann"], "index": [0, 1], "at": [5, 6]})
    one = OperatorState(
        "user string",
        {"count": count, "pages": pages.append_column("expires_at_ms", ends), "visits": visits},
        timers=pa.table({"user": ["bob"], "at_ms": [7_000]}),
        time_mode="event",
        ttl={"pages": TTL(60_000, update="read")},
        operator_lists={"seen": pa.table({"n": [8, 9]})},
        list_modes={"seen": "union"},
        broadcast_maps={"rules": pa.table({"map_key": [{"word": "w"}], "cents": [10]})},
    )
    to = f"file://{folder}/{name}"
    place = location(folder / f"location-{name}", 2)
    statebackend.write_savepoint(
        to,
        {"click/counter": one},
        parallelism=2,
        max_parallelism=16,
        watermark_ms=500,
        sources=str(place),
    )
    return to


def test_other_tools_read_it_by_the_manifest_alone(tmp_path: Path) -> None:
    rows = statebackend.export_savepoint(made(tmp_path), f"file://{tmp_path}/out")
    folder = tmp_path / "out"
    manifest = json.loads((folder / "manifest.json").read_text())
    (operator,) = manifest["operators"]
    assert operator["uid"] == "click/counter"
    assert operator["key_columns"] == ["user"]
    found = {
        state["name"]: pa.concat_tables(
            parquet.read_table(folder / f["name"]) for f in state["files"]
        )
        for state in operator["states"]
    }
    assert found["count"].schema.names == ["key_group", "key", "value"]
    counts = {row["key"]["user"]: row["value"]["n"] for row in found["count"].to_pylist()}
    assert counts == {"ann": 1, "bob": 2}
    assert sorted(found["pages"]["expires_at_ms"].to_pylist()) == [1_000, 2_000]
    assert [state["ttl"] for state in operator["states"] if state["name"] == "pages"] == [
        {"ms": 60_000, "update": "read", "expired": "hide"}
    ]
    names = [file["name"] for file in operator["timers"]]
    (timer,) = parquet.read_table(folder / names[0]).to_pylist()
    assert (timer["key"], timer["at_ms"]) == ({"user": "bob"}, 7_000)
    files = [file for state in operator["states"] for file in state["files"]]
    assert sum(file["rows"] for file in [*files, *operator["timers"]]) == rows == 10
    for file in [*files, *manifest["sources"]]:
        data = (folder / file["name"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["size_bytes"], file["sha256"])
    assert json.loads((folder / "sources/metadata").read_text()) == {"id": "query"}
    offsets = (folder / "sources/offsets/1").read_text().splitlines()
    assert offsets[2] == '{"logOffset": 1}'
    assert (manifest["epoch"], manifest["watermark_ms"]) == (1, 500)


def test_what_an_earlier_release_exported_is_imported(tmp_path: Path) -> None:
    """`python -m tests.tables.test_portable` made the golden folder."""
    to = f"file://{tmp_path}/back"
    found = statebackend.import_savepoint(GOLDEN.as_uri(), to)
    fresh = made(tmp_path)
    assert everything(to) == everything(fresh)
    assert [file.name for file in found.spark] == [
        "metadata",
        "offsets/0",
        "offsets/1",
        "commits/1",
        "sources/0/0",
        "sources/0/1",
    ]


def test_the_manifest_has_the_bytes_that_the_page_describes(tmp_path: Path) -> None:
    statebackend.import_savepoint(GOLDEN.as_uri(), f"file://{tmp_path}/back")
    statebackend.export_savepoint(f"file://{tmp_path}/back", f"file://{tmp_path}/again")
    manifests = [(one / "manifest.json").read_bytes() for one in (GOLDEN, tmp_path / "again")]
    # Parquet's bytes are pyarrow's; the manifest is ours.
    assert _unsized(manifests[0]) == _unsized(manifests[1])
    assert manifests[0].endswith(b"}\n")


def _unsized(manifest: bytes) -> bytes:
    """With other sizes and digests of Parquet files, and another checkpoint location."""
    lines = []
    parquet_file = False
    for line in manifest.splitlines():
        if b'"name": ' in line:
            parquet_file = line.rstrip(b",").endswith(b'.parquet"')
        moved = b'"location"' in line or b'"job"' in line
        ours = b'"size_bytes"' in line or b'"sha256"' in line
        lines.append(line.partition(b": ")[0] if moved or (parquet_file and ours) else line)
    return b"\n".join(lines)


def damage(folder: Path, how: str) -> None:
    file = next(folder.rglob("*.parquet"))
    manifest = folder / "manifest.json"
    if how == "gone":
        file.unlink()
    elif how == "other":
        data = bytearray(file.read_bytes())
        data[10] ^= 1
        file.write_bytes(bytes(data))
    elif how == "later":
        manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2', 1))
    elif how == "cut":
        manifest.write_text(manifest.read_text()[:-20])
    else:
        manifest.unlink()


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("gone", CorruptionError),
        ("other", CorruptionError),
        ("later", UnsupportedFormatError),
        ("cut", CorruptionError),
        ("none", NotRestorableError),
    ],
)
def test_what_is_damaged_is_refused_and_leaves_nothing(
    tmp_path: Path, how: str, error: Any
) -> None:
    statebackend.export_savepoint(made(tmp_path), f"file://{tmp_path}/out")
    damage(tmp_path / "out", how)
    with pytest.raises(error):
        statebackend.import_savepoint(f"file://{tmp_path}/out", f"file://{tmp_path}/back")
    assert not list(open_store(f"file://{tmp_path}/back", new_id=system.new_id).list(""))


def test_a_folder_that_is_taken_is_refused(tmp_path: Path) -> None:
    one = made(tmp_path)
    with pytest.raises(SettingError, match="something lies there"):
        statebackend.export_savepoint(one, one)


def test_what_was_written_in_vain_is_removed(tmp_path: Path) -> None:
    one = made(tmp_path)

    def stop(rows: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        statebackend.export_savepoint(one, f"file://{tmp_path}/out", rows_progress=stop)
    assert not list(open_store(f"file://{tmp_path}/out", new_id=system.new_id).list(""))


@pytest.mark.full  # random values of every type: some seconds
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    keys=tables(types(maps=False)),
    map_keys=tables(types(maps=False)),
    values=tables(types(maps=True)),
    kind=st.sampled_from(["value", "list", "map", "split", "broadcast"]),
    expires=st.booleans(),
)
def test_every_type_and_kind_comes_back(
    tmp_path_factory: Any, keys: Any, map_keys: Any, values: Any, kind: str, expires: bool
) -> None:
    schemas = {"key": keys[0], "map_key": map_keys[0], "value": values[0]}
    rows = [row for row in zip(keys[1], map_keys[1], values[1], strict=False) if _is_key(row[0])]
    columns = {
        name: pa.StructArray.from_arrays(to_arrow(schema, [r[n] for r in rows]), names=schema.names)
        for n, (name, schema) in enumerate(schemas.items())
    }
    of_keys = kind in ("value", "list", "map")
    left_out = {"map_key"} if kind not in ("map", "broadcast") else set()
    table = pa.table(
        {n: c for n, c in columns.items() if n not in left_out and (of_keys or n != "key")}
    )
    if kind == "list":
        table = table.append_column("index", pa.array(range(len(rows)), pa.int64()))
    ttl = {}
    if expires and of_keys:
        table = table.append_column("expires_at_ms", pa.array(range(len(rows)), pa.int64()))
        ttl = {"s": TTL(1_000)}
    where = {"value": "states", "list": "states", "map": "states", "split": "operator_lists"}
    given_rows = {where.get(kind, "broadcast_maps"): {"s": table}}
    one = OperatorState(keys[0], schemas={"s": values[0]}, ttl=ttl, **given_rows)
    folder = tmp_path_factory.mktemp("any")
    to = f"file://{folder}/saved"
    statebackend.write_savepoint(to, {"op": one}, max_parallelism=16, parallelism=2)
    assert everything(there_and_back(to, folder)) == everything(to)


def _is_key(row: tuple[Any, ...]) -> bool:
    return any(value is not None for value in row)


if __name__ == "__main__":
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        statebackend.export_savepoint(made(Path(name)), f"file://{name}/out")
        shutil.copytree(Path(name) / "out", GOLDEN)
