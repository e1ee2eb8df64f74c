"""A file source gives each row once, from any position, and names the file that is damaged."""

from __future__ import annotations

import json
import pickle
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from statebackend.continuous.sinks.file_sink import FileSink
from statebackend.continuous.sinks.sink import SinkContext
from statebackend.continuous.sources import line_files as lines_module
from statebackend.continuous.sources.file_source import FileSource
from statebackend.continuous.sources.source import Json, Split, SplitReader
from statebackend.errors import (
    ConnectorError,
    DamagedInputError,
    NotReplayableError,
    SchemaError,
    SettingError,
    UnsupportedTypeError,
)

SCHEMA = "n BIGINT, s STRING"
FORMATS = ("parquet", "json", "csv")


def write(path: Path, format: str, rows: list[tuple[int, str]], **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if format == "parquet":
        table = pa.table(
            {"n": pa.array([n for n, _ in rows], pa.int64()), "s": [s for _, s in rows]}
        )
        pq.write_table(table, path, **options)
    elif format == "json":
        path.write_text("".join(json.dumps({"n": n, "s": s}) + "\n" for n, s in rows))
    else:
        path.write_text("n,s\n" + "".join(f"{n},{s}\n" for n, s in rows))


def drain(reader: SplitReader, max_rows: int = 1000) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    while not reader.ended:
        batch = reader.read(max_rows)
        if batch is not None:
            assert 0 < batch.num_rows <= max_rows
            rows += [tuple(row.values()) for row in batch.to_pylist()]
    assert reader.read(max_rows) is None
    reader.close()
    reader.close()
    return rows


def rows_of(source: FileSource, splits: tuple[Split, ...] | None = None) -> list[tuple[Any, ...]]:
    found = source.discover(None).splits if splits is None else splits
    return [row for split in found for row in drain(source.open(split, None))]


@pytest.mark.parametrize("format", FORMATS)
def test_files_are_read_in_the_order_of_their_names(format: str, tmp_path: Path) -> None:
    write(tmp_path / f"b.{format}", format, [(3, "x")])
    write(tmp_path / f"a.{format}", format, [(1, ""), (2, "ü")])
    write(tmp_path / "sub" / f"c.{format}", format, [(4, "y")])
    write(tmp_path / f"_staged.{format}", format, [(8, "z")])
    write(tmp_path / ".hidden" / f"d.{format}", format, [(9, "z")])
    source = FileSource(tmp_path, schema=SCHEMA, format=format)
    found = source.discover(None)
    assert found.done
    assert source.bounded
    empty = None if format == "csv" else ""
    assert rows_of(source, found.splits) == [(1, empty), (2, "ü"), (3, "x"), (4, "y")]
    assert pickle.loads(pickle.dumps(source)).discover(None) == found


@pytest.mark.parametrize("format", FORMATS)
def test_files_that_arrive_later_are_found_once(format: str, tmp_path: Path) -> None:
    source = FileSource(tmp_path / "in", schema=SCHEMA, format=format, follow=True)
    assert not source.bounded
    first = source.discover(None)
    assert (first.splits, first.done) == ((), False)
    write(tmp_path / "in" / "b", format, [(1, "x")])
    second = source.discover(first.state)
    assert rows_of(source, second.splits) == [(1, "x")]
    assert source.discover(second.state).splits == ()
    write(tmp_path / "in" / "a", format, [(2, "x")])
    state: Json = json.loads(json.dumps(second.state))
    assert rows_of(source, source.discover(state).splits) == [(2, "x")]


def test_one_file_and_a_pattern_are_sources_too(tmp_path: Path) -> None:
    write(tmp_path / "a.json", "json", [(1, "x")])
    write(tmp_path / "b.txt", "json", [(2, "x")])
    one = FileSource(tmp_path / "a.json", schema=SCHEMA, format="json")
    assert rows_of(one) == [(1, "x")]
    some = FileSource(tmp_path, schema=SCHEMA, format="json", pattern="*.txt")
    assert rows_of(some) == [(2, "x")]


def test_files_on_another_file_system_are_read_the_same(tmp_path: Path) -> None:
    write(tmp_path / "a", "parquet", [(1, "x")])
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/file-source/in/a", (tmp_path / "a").read_bytes())
    fs.pipe_file("/file-source/one.json", b'{"n":2}\n')
    try:
        source = FileSource("memory://file-source/in", schema=SCHEMA)
        assert rows_of(source) == [(1, "x")]
        one = FileSource("memory://file-source/one.json", schema=SCHEMA, format="json")
        assert rows_of(one) == [(2, None)]
        fs.pipe_file("/file-source/in/a", b"xy")
        with pytest.raises(NotReplayableError, match="has 2"):
            source.open(Split(id="a", data={"file": "a", "size": 9, "start": 0, "end": 9}), None)
    finally:
        fs.rm("/file-source", recursive=True)


@pytest.mark.parametrize("format", FORMATS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(
    count=st.integers(0, 60),
    split_bytes=st.integers(1, 400),
    reads=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    block=st.integers(1, 200),
    group=st.integers(1, 20),
)
def test_from_any_position_the_rest_is_the_same(
    format: str,
    tmp_path: Path,
    count: int,
    split_bytes: int,
    reads: list[int],
    block: int,
    group: int,
) -> None:
    rows = [(n, "v" * (n % 7) + "w") for n in range(count)]
    path = tmp_path / "f"
    write(path, format, rows, **({"row_group_size": group} if format == "parquet" else {}))
    source = FileSource(tmp_path, schema=SCHEMA, format=format, split_bytes=split_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "BLOCK_BYTES", block)
        got: list[tuple[Any, ...]] = []
        for split in source.discover(None).splits:
            position: Json | None = None
            ended = False
            while not ended:  # a few rows, a checkpoint, a failure; and on from there
                reader = source.open(split, position)
                for max_rows in reads:
                    batch = reader.read(max_rows)
                    if batch is not None:
                        got += [tuple(row.values()) for row in batch.to_pylist()]
                position = json.loads(json.dumps(reader.position))
                ended = reader.ended
                reader.close()
        assert got == rows


@settings(max_examples=60)
@given(
    texts=st.lists(
        st.none() | st.text(st.characters(exclude_characters="\r\n\0", codec="utf-8"), max_size=5),
        max_size=8,
    ),
    newline=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
    block=st.integers(1, 40),
    split_bytes=st.integers(1, 40),
)
def test_csv_of_any_text_comes_back(
    texts: list[str | None], newline: str, last: bool, block: int, split_bytes: int
) -> None:
    shown = ["" if text is None else '"' + text.replace('"', '""') + '"' for text in texts]
    body = newline.join(["s,n", *(f"{text},1" for text in shown)]) + (newline if last else "")
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/csv-source/f", body.encode())
    source = FileSource(
        "memory://csv-source", schema="s STRING", format="csv", split_bytes=split_bytes
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "BLOCK_BYTES", block)
        assert rows_of(source) == [(text,) for text in texts]


def test_blank_lines_are_passed_over_but_are_nulls_of_a_lone_column(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('n,s\n\n1,x\r\n\r\n2,"y"')
    assert rows_of(FileSource(tmp_path, schema=SCHEMA, format="csv")) == [(1, "x"), (2, "y")]
    (tmp_path / "a").write_text("n\n5\n\n6\n")
    assert rows_of(FileSource(tmp_path, schema="n INT", format="csv")) == [(5,), (None,), (6,)]
    (tmp_path / "a").write_text('\n{"n":1}\r\n\r\n{}\n{"n":2,"other":[1]}')
    source = FileSource(tmp_path, schema="n INT", format="json")
    assert rows_of(source) == [(1,), (None,), (2,)]


def test_without_a_header_the_columns_are_the_schemas(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1,x\n2,y\n")
    source = FileSource(tmp_path, schema=SCHEMA, format="csv", header=False, split_bytes=3)
    assert rows_of(source) == [(1, "x"), (2, "y")]


def test_a_header_may_have_other_columns_in_another_order(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("﻿s,extra,n\nx,?,1\n", encoding="utf-8")
    assert rows_of(FileSource(tmp_path, schema=SCHEMA, format="csv")) == [(1, "x")]
    assert rows_of(FileSource(tmp_path, schema="n INT, q INT", format="csv")) == [(1, None)]


TYPES = (
    "b BOOLEAN, y TINYINT, h SMALLINT, i INT, l BIGINT, f FLOAT, d DOUBLE, m DECIMAL(20,2), "
    "s STRING, day DATE, at TIMESTAMP, local TIMESTAMP_NTZ"
)
AT = datetime(2020, 2, 3, 4, 5, 6, 789012)
ROW = {
    **{"b": True, "y": -3, "h": 300, "i": 70000, "l": -(2**62), "f": 0.5, "d": 1e-300},
    **{"m": Decimal("123456789012345678.25"), "s": 'a,"ü'},
    **{"day": date(1969, 12, 31), "at": AT.replace(tzinfo=UTC), "local": AT},
}


@pytest.mark.parametrize("format", FORMATS)
def test_what_the_file_sink_writes_the_file_source_reads(format: str, tmp_path: Path) -> None:
    nested = {} if format == "csv" else {"a": [1, None], "o": {"x": "y", "z": [{"w": 1.5}]}}
    schema = TYPES + (
        ""
        if format == "csv"
        else ", a ARRAY<INT>, o STRUCT<x: STRING, z: ARRAY<STRUCT<w: DOUBLE>>>"
    )
    source = FileSource(tmp_path, schema=schema, format=format)
    sink = FileSink(tmp_path, format=format)
    sink.check(source.schema)
    from statebackend.schema.types import arrow_schema

    rows = [{**ROW, **nested}, dict.fromkeys([*ROW, *nested])]
    writer = sink.open(SinkContext(job="j", uid="u", run="r"))
    writer.write(pa.RecordBatch.from_pylist(rows, schema=arrow_schema(source.schema)))
    sink.committer("j", "u").commit(writer.prepare(1))
    assert rows_of(source) == [tuple(row.values()) for row in rows]


def test_parquet_as_spark_writes_it_is_read(tmp_path: Path) -> None:
    table = pa.table({"at": pa.array([AT], pa.timestamp("us")), "n": pa.array([3], pa.int32())})
    pq.write_table(table, tmp_path / "a", use_deprecated_int96_timestamps=True)
    source = FileSource(tmp_path, schema="n BIGINT, at TIMESTAMP, more STRING", event_time="at")
    assert rows_of(source) == [(3, AT.replace(tzinfo=UTC), None)]


# --- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "body"),
    [
        ("parquet", b""),
        ("parquet", b"PAR1 not really PAR1"),
        ("json", b'{"n":1}\n{"n":\n'),
        ("json", b'{"n":"one"}\n'),
        ("json", b'{"n":1.5}\n'),
        ("json", b'{"n":1} {"n":2}\n'),
        ("json", b"[1]\n"),
        ("json", b'{"s":"\xff"}\n'),
        ("json", b"\x1f\x8b\x08\x00\n"),
        ("csv", b"x,y\n1,a\n"),
        ("csv", b"n,s,n\n1,a,1\n"),
        ("csv", b"n,s\none,a\n"),
        ("csv", b"n,s\n1,a,b\n"),
        ("csv", b"n,s\n1\n"),
        ("csv", b'n,s\n1,"two\nlines"\n'),
        ("csv", b'n,s\n1,"open\n'),
        ("csv", b"n,s\n1,\xff\xfe\n"),
        ("csv", b"\xff\xfe\n1,a\n"),
    ],
)
def test_a_damaged_file_is_named(format: str, body: bytes, tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(b"")
    (tmp_path / "bad").write_bytes(body)
    source = FileSource(tmp_path, schema=SCHEMA, format=format, pattern="bad")
    with pytest.raises(DamagedInputError, match=r"/bad cannot be read") as found:
        rows_of(source)
    assert found.value.todo


def test_a_column_that_must_be_there_is_missed(tmp_path: Path) -> None:
    write(tmp_path / "a", "parquet", [(1, "x")])
    with pytest.raises(DamagedInputError, match=r"/a .*'q'"):
        rows_of(FileSource(tmp_path, schema="q INT NOT NULL"))
    with pytest.raises(DamagedInputError, match=r"/a .*int64"):
        rows_of(FileSource(tmp_path, schema="n INT"))


@pytest.mark.parametrize("format", FORMATS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(data=st.data())
def test_no_damage_raises_anything_else(format: str, tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "f"
    write(path, format, [(n, f"text {n}") for n in range(30)])
    body = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.integers(1, len(body)) | st.just(len(body)))]
    path.write_bytes(body)
    said = str(path)
    try:
        rows_of(FileSource(tmp_path, schema=SCHEMA, format=format))
    except DamagedInputError as error:
        said = str(error)
    assert str(path) in said


def test_a_file_that_was_changed_or_taken_away_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", "json", [(1, "x")])
    source = FileSource(tmp_path, schema=SCHEMA, format="json")
    (split,) = source.discover(None).splits
    write(tmp_path / "a", "json", [(1, "x"), (2, "x")])
    with pytest.raises(NotReplayableError, match=r"/a had .* bytes"):
        source.open(split, None)
    (tmp_path / "a").unlink()
    with pytest.raises(NotReplayableError, match="/a is gone"):
        source.open(split, {"offset": 0})


def test_a_line_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "LINE_LIMIT_BYTES", 50)
    monkeypatch.setattr(lines_module, "BLOCK_BYTES", 20)
    (tmp_path / "a").write_text('{"n":1}\n' + '{"s":"' + "x" * 100 + '"}\n')
    with pytest.raises(DamagedInputError, match="/a has a line"):
        rows_of(FileSource(tmp_path, schema=SCHEMA, format="json"))


def test_nothing_to_read_is_said_unless_files_are_waited_for(tmp_path: Path) -> None:
    with pytest.raises(NotReplayableError, match="no file"):
        FileSource(tmp_path / "none", schema=SCHEMA).discover(None)


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a", "json", [(1, "x")])
    source = FileSource(tmp_path, schema=SCHEMA, format="json")
    (split,) = source.discover(None).splits
    fs = source.place._fs[0]

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(fs, "open", refuse)
    with pytest.raises(ConnectorError, match="/a failed: Permission denied"):
        source.open(split, None)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"format": "orc"}, SettingError),
        ({"schema": "n"}, SchemaError),
        ({"schema": "m MAP<STRING, INT>", "format": "json"}, UnsupportedTypeError),
        ({"schema": "m STRUCT<d: DATE>", "format": "json"}, UnsupportedTypeError),
        ({"schema": "m ARRAY<INT>", "format": "csv"}, UnsupportedTypeError),
        ({"event_time": "n"}, SchemaError),
        ({"event_time": "q"}, SchemaError),
        ({"watermark_delay": "soon"}, SettingError),
        ({"idle_after_s": 0}, SettingError),
        ({"split_bytes": 0}, SettingError),
    ],
)
def test_a_wrong_use_is_refused_where_it_is_made(
    options: dict[str, Any], error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error):
        FileSource(tmp_path, **{"schema": SCHEMA, **options})
