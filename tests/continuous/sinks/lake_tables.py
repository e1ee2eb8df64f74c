"""Lake tables for tests, in a folder: as a sink writes them, and as other readers see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from statebackend.continuous.sinks.delta_sink import DeltaSink
from statebackend.continuous.sinks.iceberg_sink import IcebergSink
from statebackend.continuous.sinks.sink import Committer

__all__ = ["LakeTable", "Made", "catalogs", "deltalake"]

deltalake = pytest.importorskip("deltalake", reason="the extra delta is not installed")
catalogs = pytest.importorskip("pyiceberg.catalog", reason="the extra iceberg is not installed")
pytest.importorskip("sqlalchemy", reason="pyiceberg's catalog in a file needs it")
Made = DeltaSink | IcebergSink


class LakeTable:
    """A kind of table in a folder of its own."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self._committers: list[Committer] = []
        folder.mkdir(exist_ok=True)

    def catalog(self) -> dict[str, str]:
        where = self.folder
        return {"type": "sql", "uri": f"sqlite:///{where}/c.db", "warehouse": str(where)}

    @contextmanager
    def opened(self) -> Iterator[Any]:
        """As readers open it."""
        if self.kind == "delta":
            yield deltalake.DeltaTable(self.folder / "t")
            return
        with catalogs.load_catalog("default", **self.catalog()) as catalog:
            yield catalog.load_table("shop.t")

    def sink(self, rows: T.StructType | None = None, **options: Any) -> Made:
        made: Made
        if self.kind == "delta":
            made = DeltaSink(self.folder / "t", **options)
        else:
            made = IcebergSink("shop.t", catalog_properties=self.catalog, **options)
        if rows is not None:
            made.check(rows)
        return made

    def committer(self, sink: Made, uid: str = "out") -> Committer:
        """Of the job `clicks`; `close` closes it."""
        self._committers.append(sink.committer("clicks", uid))
        return self._committers[-1]

    def close(self) -> None:
        for committer in self._committers:
            committer.close()

    def read(self) -> pa.Table:
        with self.opened() as table:
            return table.to_pyarrow_table() if self.kind == "delta" else table.scan().to_arrow()

    def numbers(self) -> list[int]:
        return sorted(self.read()["n"].to_pylist())

    def commits(self) -> int:
        with self.opened() as table:
            return len(table.history())
