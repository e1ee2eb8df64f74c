"""Reads a lake table from outside: while the job runs by the table's library, at the end by hand.

By hand: the log is read as the table's specification says it, and DuckDB reads the files that it
names. So neither delta-rs, PyIceberg nor Arrow, by which the sinks write, has a part in it.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import duckdb
import fastavro
import msgspec
import pyarrow as pa

from tests.kafkarounds.kafkajob import catalog_of

__all__ = ["LakeReader", "Row"]

Row = tuple[int, int, int, int]
_DELETED: Final = 2  # status of an entry in a manifest


class LakeReader:
    """Reads a lake table each time that it is asked.

    Args:
        kind: delta or iceberg. folder: of the rounds.
    """

    error: Any = None

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind, self._folder = kind, folder / "lake"

    def start(self) -> None:
        """There is nothing to begin."""

    @property
    def rows(self) -> Counter[Row]:
        """Each with how often the table's library finds it."""
        found = self._table().to_pylist()
        return Counter((row["key"], row["value"], row["n"], row["total"]) for row in found)

    def has(self, rows: int) -> bool:
        """Whether the first so many rows of the input have come out."""
        values = self._table()
        return bool(len(values)) and set(range(rows)) <= set(values["value"].to_pylist())

    def end(self) -> Counter[Row]:
        """All rows, read by hand; the table's library must find the same."""
        of = delta_files if self._kind == "delta" else iceberg_files
        found: Counter[Row] = Counter()
        with duckdb.connect() as reader:
            for file in of(self._folder):
                query = "SELECT key, value, n, total FROM read_parquet(?)"
                found.update(reader.execute(query, [str(file)]).fetchall())
        assert found == self.rows, f"Its library finds other rows than the log of {self._folder}."
        return found

    def _table(self) -> Any:
        if self._kind == "delta":
            import deltalake

            try:
                return deltalake.DeltaTable(self._folder / "t").to_pyarrow_table()
            except deltalake.exceptions.TableNotFoundError:
                return pa.table({})
        from pyiceberg.catalog import load_catalog
        from pyiceberg.exceptions import NoSuchTableError

        try:
            with load_catalog("default", **catalog_of(str(self._folder))) as catalog:
                return catalog.load_table("lake.t").scan().to_arrow()
        except NoSuchTableError:
            return pa.table({})


def delta_files(folder: Path) -> Iterator[Path]:
    """What the log of the table ``t`` names; its first commits are all still there."""
    commits = sorted((folder / "t" / "_delta_log").glob("*.json"))
    assert [int(commit.stem) for commit in commits] == list(range(len(commits)))
    named = set()
    for commit in commits:
        for line in commit.read_bytes().splitlines():
            action = msgspec.json.decode(line)
            if "add" in action:
                named.add(unquote(action["add"]["path"]))
            elif "remove" in action:
                named.discard(unquote(action["remove"]["path"]))
    return (folder / "t" / name for name in named)


def iceberg_files(folder: Path) -> Iterator[Path]:
    """What the newest snapshot of the catalog's only table names."""
    with sqlite3.connect(folder / "catalog.db") as catalog:
        ((where,),) = catalog.execute("SELECT metadata_location FROM iceberg_tables").fetchall()
    catalog.close()
    metadata = msgspec.json.decode(_path(where).read_bytes())
    newest = metadata["current-snapshot-id"]
    (snapshot,) = [one for one in metadata["snapshots"] if one["snapshot-id"] == newest]
    for manifest in _avro(snapshot["manifest-list"]):
        for entry in _avro(manifest["manifest_path"]):
            if entry["status"] != _DELETED:
                yield _path(entry["data_file"]["file_path"])


def _avro(where: str) -> list[dict[str, Any]]:
    with _path(where).open("rb") as file:
        return list(fastavro.reader(file))


def _path(where: str) -> Path:
    return Path(where.removeprefix("file://"))
