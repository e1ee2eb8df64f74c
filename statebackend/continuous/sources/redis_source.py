"""Streams of a Redis server as a source: a log that can be read again from any entry.

A split is one stream. A position is the id of the last entry that was read, and how many entries
had been added to the stream up to it: a stream that was trimmed past the position cannot give the
rest, and that is noticed (`NotReplayableError`) rather than read over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa
from pyspark.sql import types as T

from statebackend.continuous.files.file_formats import check_types
from statebackend.continuous.sources.source import Discovery, Json, Source, Split, SplitReader
from statebackend.errors import (
    ConnectorError,
    DamagedInputError,
    EnvironmentMissingError,
    NotReplayableError,
    SettingError,
)
from statebackend.schema.types import arrow_schema
from statebackend.spark_forms import Duration
from statebackend.texts import install_extra

__all__ = ["RedisStreamSource"]

TIMEOUT_S: Final = 10.0
_FIRST: Final = "0-0"
_R = TypeVar("_R")


class RedisStreamSource(Source):
    """Reads Redis streams, in the order of their ids; needs Redis 7 and the extra ``redis``.

    Each field of an entry is the column of that name, as text that its type is read from; one that
    is missing is null. Fields that the schema does not name are left out.

    Entries may be trimmed or deleted once every checkpoint that is to be restored has read them.
    """

    splits_end = False

    def __init__(
        self,
        url: str,
        streams: Sequence[str],
        *,
        schema: T.DataType | str,
        start: str = "earliest",
        bounded: bool = False,
        event_time: str | None = None,
        watermark_delay: str | timedelta = "0 seconds",
        idle_after_s: Duration | None = None,
        password: Callable[[], str] | None = None,
    ) -> None:
        """Name the streams; nothing is opened.

        Args:
            url: ``redis://host:port/db``, or ``rediss://`` for TLS; without a password.
            streams: their keys. One that is not there yet may come later.
            schema: of the rows: booleans, numbers, strings, dates and timestamps.
            start: ``earliest``, or ``latest`` for entries from the first start of the job on.
            bounded: end with the last entry that is there at the first start of the job.
            event_time: the column that says when a row happened; None: there is no watermark.
            watermark_delay: how late rows may come: "10 seconds", or a timedelta.
            idle_after_s: a split without rows for so long no longer holds the watermark back.
            password: gives it, in each process that connects.

        Raises:
            SettingError: no such start, no streams, or a URL that is none or holds a password.
            SchemaError, UnsupportedTypeError: a schema that is none, or holds more than texts can.
        """
        super().__init__(
            schema,
            bounded=bounded,
            event_time=event_time,
            watermark_delay=watermark_delay,
            idle_after_s=idle_after_s,
        )
        check_types(self.schema, "csv")
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss") or not parts.hostname:
            raise SettingError("The URL names no Redis server.", todo="Use redis://host:port/db.")
        if parts.password or "password=" in parts.query:
            raise SettingError(
                "The URL of the Redis server holds a password.",
                todo="Leave it out, and pass password=, a function that gives it.",
            )
        if not streams or len(set(streams)) < len(streams) or start not in ("earliest", "latest"):
            raise SettingError(
                f"No source has streams={list(streams)!r} and start={start!r}.",
                todo='Name each stream once, and start "earliest" or "latest".',
            )
        self._url = url
        self._shown = f"{parts.hostname}:{parts.port or 6379}"
        self._streams = tuple(streams)
        self._start = start
        self._password = password

    def __repr__(self) -> str:
        return f"RedisStreamSource({self._shown}, {', '.join(self._streams)})"

    def discover(self, state: Json | None) -> Discovery:
        """Where each stream begins for this job, and ends, if the source is bounded."""
        if state is not None:
            return Discovery((), state, done=True)
        server = _Server(self._url, self._shown, self._password)
        try:
            splits = [self._split(server, key) for key in self._streams]
        finally:
            server.close()
        return Discovery(tuple(splits), {"streams": list(self._streams)}, done=True)

    def _split(self, server: _Server, key: str) -> Split:
        info = server.info(key)
        deleted = info.deleted if info else _FIRST
        if info is None:
            first = {"id": _FIRST, "added": 0}
        elif self._start == "latest":
            first = {"id": info.last, "added": info.added}
        else:
            first = {"id": _FIRST, "added": info.added - info.length}
        end = (info.last if info else _FIRST) if self.bounded else None
        data = {"stream": key, "first": first, "end": end, "deleted": deleted}
        return Split(id=key, data=data)

    def open(self, split: Split, position: Json | None) -> SplitReader:
        """Connect.

        Raises:
            ConnectorError: the server cannot be reached.
            NotReplayableError: entries after the position are gone.
        """
        server = _Server(self._url, self._shown, self._password)
        try:
            return _Reader(server, self.schema, split.data, position or split.data["first"])
        except BaseException:
            server.close()
            raise


class _Info:
    """What a server says of a stream."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.length = int(found["length"])
        self.last = _text(found["last-generated-id"])
        self.deleted = _text(found["max-deleted-entry-id"])
        self.added = int(found["entries-added"])


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _order(id: str) -> tuple[int, int]:
    milliseconds, _, sequence = id.partition("-")
    return int(milliseconds), int(sequence or 0)


class _Server:
    """A connection, and typed errors."""

    def __init__(self, url: str, shown: str, password: Callable[[], str] | None) -> None:
        try:
            import redis
        except ImportError as error:
            raise EnvironmentMissingError(
                "The package redis is missing.",
                todo=install_extra("redis", "on the driver and on every executor"),
            ) from error
        self._redis = redis
        self.shown = shown
        self._client: Any = redis.Redis.from_url(
            url,
            password=password() if password else None,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            protocol=2,
        )

    def info(self, key: str) -> _Info | None:
        """Of a stream; None: there is none of that key."""
        return self._try(key, lambda: self._info_of(self._client.pipeline(transaction=False), key))[
            0
        ]

    def after(self, key: str, id: str, count: int) -> tuple[_Info | None, list[Any]]:
        """The entries after an id, and the stream's state at that same moment."""

        def ask() -> tuple[_Info | None, list[Any]]:
            pipeline = self._client.pipeline(transaction=True)
            pipeline.xrange(key, min=f"({id}", count=count)
            return self._info_of(pipeline, key)

        return self._try(key, ask)

    def _info_of(self, pipeline: Any, key: str) -> tuple[_Info | None, list[Any]]:
        pipeline.xinfo_stream(key)
        *before, found = pipeline.execute(raise_on_error=False)
        for answer in before:
            if isinstance(answer, Exception):
                raise answer
        entries = before[0] if before else []
        if isinstance(found, self._redis.ResponseError) and "no such key" in str(found):
            return None, entries
        if isinstance(found, Exception):
            raise found
        if "entries-added" not in found:
            raise EnvironmentMissingError(
                f"The Redis server {self.shown} is older than 7.0.",
                todo="Use a later one: only those say what was trimmed.",
            )
        return _Info(found), entries

    def _try(self, key: str, call: Callable[[], _R]) -> _R:
        try:
            return call()
        except (self._redis.RedisError, OSError) as error:
            raise ConnectorError(
                f"Reading the stream {key!r} of the Redis server {self.shown} failed: {error}.",
                todo="Check that it runs, that this host may reach it, and that it is a stream.",
            ) from error

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


class _Reader(SplitReader):
    def __init__(self, server: _Server, schema: T.StructType, data: Json, position: Json) -> None:
        self._server = server
        self._schema = schema
        self._arrow = arrow_schema(schema)
        self._key: str = data["stream"]
        self._end: str | None = data["end"]
        self._deleted: str = data["deleted"]  # before the job began
        self._id: str = position["id"]
        self._added: int = position["added"]
        self._check(server.info(self._key))

    @property
    def position(self) -> Json:
        return {"id": self._id, "added": self._added}

    @property
    def ended(self) -> bool:
        return self._end is not None and _order(self._id) >= _order(self._end)

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        if self.ended:
            return None
        info, entries = self._server.after(self._key, self._id, max_rows)
        self._check(info)
        if self._end is not None:
            end = _order(self._end)
            entries = [entry for entry in entries if _order(_text(entry[0])) <= end]
        if not entries:
            return None
        batch = self._batch(entries)
        self._id = _text(entries[-1][0])
        self._added += len(entries)
        return batch

    def _check(self, info: _Info | None) -> None:
        """Refuse to go on where entries after the position are gone."""
        if info is None:
            gone = self._added > 0 or (self._end or _FIRST) != _FIRST
        else:
            # Trimming takes the oldest ones: more of them gone than were read means unread ones.
            gone = (
                _order(info.last) < _order(self._id)
                or _order(info.deleted) > max(_order(self._id), _order(self._deleted))
                or not info.added - info.length <= self._added <= info.added
            )
        if gone:
            raise NotReplayableError(
                f"Entries after {self._id} of the stream {self._key!r} of the Redis server "
                f"{self._server.shown} are gone: it was trimmed or deleted.",
                todo="Keep what the oldest checkpoint to be restored has not read; to go on "
                "without them, start the job anew.",
            )

    def _batch(self, entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> pa.RecordBatch:
        columns = []
        for field in self._schema:
            name = field.name.encode()
            texts = (values.get(name) for _, values in entries)
            columns.append(self._column(texts, field, entries))
        return pa.RecordBatch.from_arrays(columns, schema=self._arrow)

    def _column(
        self, texts: Iterable[bytes | None], field: T.StructField, entries: Sequence[Any]
    ) -> pa.Array:
        try:
            column = pa.array(list(texts), pa.binary()).cast(pa.string())
            column = column.cast(self._arrow.field(field.name).type)
            if column.null_count and not field.nullable:
                raise ValueError("it may not be missing")
        except (pa.ArrowException, ValueError) as error:
            raise DamagedInputError(
                f"Field {field.name!r} of an entry from {_text(entries[0][0])} to "
                f"{_text(entries[-1][0])} of the stream {self._key!r} is no "
                f"{field.dataType.simpleString()}: {error}.",
                todo="Declare the field STRING, and read it in the processor.",
            ) from error
        return column

    def close(self) -> None:
        self._server.close()
