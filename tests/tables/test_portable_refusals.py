"""A manifest that cannot be, or does not fit its files, is refused; nothing is written then."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

import statebackend
from statebackend.errors import CorruptionError
from statebackend.tables.portable import portable_import

GOLDEN = Path(__file__).parents[1] / "golden" / "portable1"
Change = Callable[[Any], Any]


def operator(manifest: Any) -> Any:
    (one,) = manifest["operators"]
    return one


def state(manifest: Any, name: str) -> Any:
    return next(one for one in operator(manifest)["states"] if one["name"] == name)


def without_metadata(manifest: Any) -> None:
    kept = [one for one in manifest["sources"] if one["name"] != "sources/metadata"]
    manifest["sources"] = kept


WRONG: dict[str, Change] = {
    "no sources/metadata": without_metadata,
    "no file of a checkpoint": lambda m: m["sources"][1].update(name="sources/../../x"),
    "is no file of a": lambda m: m["sources"][1].update(name="manifest.json"),
    "kind of state 'count' is 'set'": lambda m: state(m, "count").update(kind="set"),
    "a map, has no map_key": lambda m: state(m, "count").update(kind="map"),
    "a value, has a map_key": lambda m: state(m, "pages").update(kind="value"),
    "a broadcast, has no": lambda m: state(m, "count").update(kind="broadcast"),
    "has a column expires_at_ms": lambda m: state(m, "pages").update(ttl=None),
    "has no column expires_at_ms": lambda m: state(m, "count").update(ttl=state(m, "pages")["ttl"]),
    "has 2 rows": lambda m: state(m, "count")["files"][0].update(rows=5),
    "the time mode": lambda m: operator(m).update(time_mode="later"),
    "operator 'click/counter'": lambda m: m["operators"].append(operator(m)),
    "state of operator": lambda m: operator(m)["states"].append(state(m, "count")),
    "operator ''": lambda m: operator(m).update(uid=""),
    "it has no operator": lambda m: m.update(operators=[]),
    "its epoch is -7": lambda m: m.update(epoch=-7),
    "has no key_schema": lambda m: operator(m).update(key_schema=None),
    "file 'operators": lambda m: operator(m).update(timers=state(m, "count")["files"]),
}


@pytest.mark.parametrize("said", WRONG)
def test_a_manifest_that_does_not_fit_is_refused(tmp_path: Path, said: str) -> None:
    shutil.copytree(GOLDEN, tmp_path / "in")
    place = tmp_path / "in" / "manifest.json"
    manifest = json.loads(place.read_text())
    WRONG[said](manifest)
    place.write_text(json.dumps(manifest))
    with pytest.raises(CorruptionError, match=said):
        statebackend.import_savepoint(f"file://{tmp_path}/in", f"file://{tmp_path}/out")
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


def test_large_rows_come_a_few_at_a_time(tmp_path: Path) -> None:
    for name, size in (("small", 8), ("large", 1 << 20)):
        rows = pa.table({"v": [b"%d" % n * (size // 4) for n in range(128)]})
        parquet.write_table(rows, tmp_path / name, compression="zstd", use_dictionary=False)
    at_once = {
        name: portable_import._rows_at_once(parquet.read_metadata(tmp_path / name))
        for name in ("small", "large")
    }
    assert at_once["small"] > 1_000 > at_once["large"] > 10
