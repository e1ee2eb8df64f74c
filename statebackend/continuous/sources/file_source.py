"""A folder of files as a source: Parquet, JSON lines or CSV, also files that arrive later."""

from __future__ import annotations

import os
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Final

from pyspark.sql import types as T

from statebackend.continuous.files.file_formats import check_format, check_types
from statebackend.continuous.files.folder_access import Place
from statebackend.continuous.sources.line_files import CsvLines, JsonLines, LineReader
from statebackend.continuous.sources.parquet_row_groups import RowGroupReader
from statebackend.continuous.sources.source import Discovery, Json, Source, Split, SplitReader
from statebackend.errors import NotReplayableError, SettingError
from statebackend.spark_forms import Duration

__all__ = ["FileSource"]

SPLIT_BYTES: Final = 128 << 20
_TODO: Final = (
    "A file of a source may not be changed, moved or deleted while a checkpoint needs it: put it "
    "back as it was, or restore from a checkpoint that is done with it."
)


class FileSource(Source):
    """Reads the files of a folder and its subfolders, in the order of their names.

    A file must be whole when it appears under its name: write it beside, or under a name that
    starts with ``.`` or ``_`` (such names are passed over), and move it. It may not be changed
    afterwards; one whose size is another than when it was found is refused.

    A column that a file lacks is null there, if the schema lets it be. Timestamps in JSON and CSV
    are ISO 8601, with ``Z`` or an offset for TIMESTAMP and without for TIMESTAMP_NTZ. CSV values
    have no line breaks in them.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        schema: T.DataType | str,
        format: str = "parquet",
        follow: bool = False,
        pattern: str | None = None,
        header: bool = True,
        split_bytes: int = SPLIT_BYTES,
        event_time: str | None = None,
        watermark_delay: str | timedelta = "0 seconds",
        idle_after_s: Duration | None = None,
    ) -> None:
        """Name the folder; nothing is opened.

        Args:
            path: a folder (or a single file), by a path that all executors see or an fsspec URL.
            schema: of the rows; Spark DDL or a `StructType`.
            format: ``parquet``, ``json`` or ``csv``.
            follow: go on looking for files that arrive later; the source then never ends.
            pattern: only files whose name, without folders, matches it (``*.jsonl``).
            header: whether a CSV file's first line names its columns; else they are the schema's.
            split_bytes: larger files are read by several subtasks.
            event_time: the column that says when a row happened; None: there is no watermark.
            watermark_delay: how late rows may come: "10 seconds", or a timedelta.
            idle_after_s: a split without rows for so long no longer holds the watermark back.

        Raises:
            SchemaError, UnsupportedTypeError: a schema that is none or that the format cannot hold.
            SettingError: no such format, or no place.
        """
        super().__init__(
            schema,
            bounded=not follow,
            event_time=event_time,
            watermark_delay=watermark_delay,
            idle_after_s=idle_after_s,
        )
        check_format(format)
        check_types(self.schema, format)
        if split_bytes < 1:
            raise SettingError(f"split_bytes={split_bytes} is no size.", todo="Give bytes above 0.")
        self.place = Place(path)
        self.format = format
        self._pattern = pattern
        self._header = header
        self._split_bytes = split_bytes

    def __repr__(self) -> str:
        return f"FileSource({self.place.url!r}, format={self.format!r})"

    def discover(self, state: Json | None) -> Discovery:
        """List the folder. The state has the names that were seen.

        Raises:
            ConnectorError: it cannot be listed.
            NotReplayableError: the source does not follow, and there is no file.
        """
        seen = set(state["seen"]) if state else set()
        splits: list[Split] = []
        for name, size in self.place.files():
            if name in seen or not self._matches(name):
                continue
            seen.add(name)
            splits += self._splits(name, size)
        if self.bounded and not seen:
            raise NotReplayableError(
                f"There is no file to read in {self.place.url}.",
                todo="Check the path and the pattern, or say follow=True to wait for files.",
            )
        return Discovery(tuple(splits), {"seen": sorted(seen)}, done=self.bounded)

    def _matches(self, name: str) -> bool:
        last = name.rpartition("/")[2]
        return self._pattern is None or not name or fnmatchcase(last, self._pattern)

    def _splits(self, name: str, size: int) -> list[Split]:
        # An empty file of lines has no rows; an empty Parquet file is none, which its reader says.
        starts = range(0, size, self._split_bytes)
        if not size and self.format == "parquet":
            starts = range(1)
        return [
            Split(
                id=f"{name}@{start:015d}",
                data={
                    "file": name,
                    "size": size,
                    "start": start,
                    "end": min(start + self._split_bytes, size),
                },
            )
            for start in starts
        ]

    def open(self, split: Split, position: Json | None) -> SplitReader:
        """Open the split's file.

        Raises:
            ConnectorError: it cannot be read.
            NotReplayableError: it is gone, or of another size.
            DamagedInputError: it is not of the format, or has not the schema's columns.
        """
        name, start, end = split.data["file"], split.data["start"], split.data["end"]
        self._check_unchanged(name, split.data["size"])
        if self.format == "parquet":
            return RowGroupReader(
                self.place, name, self.schema, start=start, end=end, position=position
            )
        lines = (
            JsonLines(self.schema)
            if self.format == "json"
            else CsvLines(self.schema, header=self._header)
        )
        offset = None if position is None else int(position["offset"])
        return LineReader(self.place, name, lines, start=start, end=end, offset=offset)

    def _check_unchanged(self, name: str, size: int) -> None:
        found = self.place.size(name)
        if found is None:
            raise NotReplayableError(f"{self.place.shown(name)} is gone.", todo=_TODO)
        if found != size:
            raise NotReplayableError(
                f"{self.place.shown(name)} had {size} bytes when it was found, and has {found}.",
                todo=_TODO,
            )
