"""A Delta table as a sink, by delta-rs: each checkpoint is one commit, exactly once.

The commit carries a *transaction* of Delta's protocol (`txn`: application id and version). Before a
commit, the sink looks the version up in the snapshot that the commit is based on. delta-rs takes a
commit with an old version as it is, and tries again by itself after a conflict: so its own tries
are switched off, and after each conflict the sink looks again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from statebackend.continuous.files.folder_access import Place
from statebackend.continuous.sinks.sink import Committer, SinkContext, SinkWriter
from statebackend.continuous.sinks.table_checks import (
    check_partition_names,
    nullable,
    table_errors,
)
from statebackend.continuous.sinks.table_files import (
    TARGET_BYTES,
    TableCommitter,
    TableFile,
    TableSink,
    TableWriter,
    check_target,
    check_there,
    missing_in,
    split_by,
)
from statebackend.errors import (
    ConnectorError,
    EnvironmentMissingError,
    SchemaError,
    SettingError,
    UnsupportedTypeError,
)
from statebackend.schema.types import arrow_schema
from statebackend.system import SYSTEM
from statebackend.texts import install_extra

if TYPE_CHECKING:
    from deltalake import DeltaTable

__all__ = ["DeltaSink"]

_TODO: Final = "Check that the table is there, and that the driver may use it."
_PARTITION_TYPES: Final = (
    T.StringType,
    T.ByteType,
    T.ShortType,
    T.IntegerType,
    T.LongType,
    T.BooleanType,
    T.DateType,
)
# What a table may ask of its writers that appending whole files fulfils.
_FEATURES: Final = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "deletionVectors",
        "domainMetadata",
        "invariants",
        "timestampNtz",
        "v2Checkpoint",
        "vacuumProtocolCheck",
    }
)
_NOT_FULFILLED: Final = ("delta.constraints.", "delta.columnMapping.mode")
_COMPUTED: Final = ("delta.generation", "delta.identity", "delta.invariants")  # of columns
Options = Mapping[str, str]


class DeltaSink(TableSink):
    """Appends to a Delta table, exactly once; needs the extra ``delta``.

    Each checkpoint in which rows came is one commit. The table is made when the job first starts,
    if it is not there. Files of checkpoints that were never completed go with the table's next
    ``VACUUM``, whose retention must be longer than the job may stand still.
    """

    def __init__(
        self,
        table: str | os.PathLike[str],
        *,
        partition_by: Sequence[str] = (),
        add_columns: bool = False,
        target_file_bytes: int = TARGET_BYTES,
        storage_options: Callable[[], Options] | None = None,
    ) -> None:
        """Name the table; nothing is opened.

        Args:
            table: its folder, by a path that the driver and all executors see, or an fsspec URL
                that delta-rs knows as well (``s3://``, ``gs://``, ``abfss://``).
            partition_by: columns: strings, whole numbers, booleans, dates. A table that is there
                must have the same.
            add_columns: add to the table what its schema lacks, when the job starts.
            target_file_bytes: a new file is begun when one has so many, before compression. There
                is at least one for each checkpoint, subtask and partition in which rows came.
            storage_options: gives what delta-rs is to know of the store, on the driver alone.
                Default: what it finds in the environment.

        Raises:
            SettingError: no place, or no size.
        """
        check_target(target_file_bytes)
        if len(set(partition_by)) < len(partition_by) or isinstance(partition_by, str):
            raise SettingError(
                f"partition_by={partition_by!r} does not name columns once each.",
                todo='Give a list such as ["day"].',
            )
        self.place = Place(table)
        self._partition_by = list(partition_by)
        self._add_columns = add_columns
        self._target_bytes = target_file_bytes
        self._options = storage_options
        self._schema: T.StructType | None = None

    def __repr__(self) -> str:
        return f"DeltaSink({self.place.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_options": None}  # credentials stay on the driver

    def check(self, schema: T.StructType) -> None:
        """Refuse rows that cannot be partitioned as asked."""
        check_partitions(schema, self._partition_by)
        self._schema = schema

    def open(self, context: SinkContext) -> SinkWriter:
        """A writer of data files."""
        return TableWriter(
            self.place,
            context,
            split=split_by(self._partition_texts, self._partition_by)
            if self._partition_by
            else None,
            names_partitions=True,
            target_bytes=self._target_bytes,
            wall_ms=SYSTEM.wall_ms,
        )

    def _partition_texts(self, batch: pa.RecordBatch) -> list[pa.Array]:
        return [_texts(batch.column(name)) for name in self._partition_by]

    def committer(self, job: str, uid: str) -> Committer:
        """Names the files in the table's log. Makes the table, or checks the one that is there.

        Raises:
            EnvironmentMissingError: delta-rs is not installed.
            SchemaError: the table has other columns, other partitions, or a feature of Delta's that
                this sink does not fulfil.
            ConnectorError: the table cannot be read or made.
        """
        table = _Table(self.place.url, dict(self._options()) if self._options else None)
        if self._schema is not None:
            table.prepare(self._schema, self._partition_by, add_columns=self._add_columns)
        return TableCommitter(self.place, table)


def check_partitions(schema: T.StructType, partition_by: Sequence[str]) -> None:
    """Refuse partition columns that are not there, or have no one text for each value.

    Raises:
        SchemaError: naming the column.
    """
    check_partition_names(schema.names, partition_by)
    for name in partition_by:
        dtype = schema[name].dataType
        if not isinstance(dtype, _PARTITION_TYPES):
            raise UnsupportedTypeError(
                f"Column {name!r} is {dtype.simpleString()}, which is no type for a partition.",
                todo="Partition by strings, whole numbers, booleans or dates.",
            )
    if len(partition_by) == len(schema.names):
        raise SchemaError(
            "partition_by names every column.", todo="Leave one that is no partition."
        )


def _texts(column: pa.Array) -> pa.Array:
    """Partition values as Delta's protocol writes them; an empty text is null there."""
    texts = pc.cast(column, pa.string())  # ISO 8601 for dates, true and false for booleans
    return pc.if_else(pc.equal(texts, ""), None, texts)


class _Table:
    """One Delta table, by delta-rs; every call reads its newest snapshot."""

    def __init__(self, url: str, options: dict[str, str] | None) -> None:
        try:
            import deltalake
        except ImportError as error:
            raise EnvironmentMissingError(
                f"DeltaSink needs the package deltalake on the driver: {error}.",
                todo=install_extra("delta", "on the driver"),
            ) from error
        self._delta, self.name, self._options = deltalake, url, options

    def close(self) -> None:
        """delta-rs keeps no connection open."""

    def load(self) -> DeltaTable:
        with self.errors("Reading"):
            return self._loaded()

    def errors(self, what: str) -> AbstractContextManager[None]:
        kinds = (self._delta.exceptions.DeltaError, OSError)
        return table_errors(self.name, what, kinds, todo=_TODO)

    def prepare(
        self, schema: T.StructType, partition_by: Sequence[str], *, add_columns: bool
    ) -> None:
        """Make the table, or check that it takes these rows, adding columns where that is asked."""
        want = self._delta.Schema.from_arrow(nullable(arrow_schema(schema)))
        table = self._made(want, partition_by)
        have = {field.name: field for field in table.schema().fields}
        partitions = table.metadata().partition_columns
        if list(partitions) != list(partition_by):
            raise SchemaError(
                f"The table {self.name} is partitioned by {list(partitions)}, the sink by "
                f"{list(partition_by)}.",
                todo="Give the sink the table's partition_by.",
            )
        self._check_features(table)
        for field in want.fields:
            there = have.pop(field.name, None)
            if there is not None and there.type != field.type:
                raise SchemaError(
                    f"Column {field.name!r} is {_name(there)} in the table {self.name}, and "
                    f"{_name(field)} in the rows.",
                    todo="Change output_schema, or write to another table.",
                )
        missing = [field for field in want.fields if field.name not in table_names(table)]
        needed = [name for name, field in have.items() if not field.nullable]
        if needed:
            raise SchemaError(
                f"The table {self.name} wants {', '.join(needed)}, which the rows do not have.",
                todo="Give the rows these columns, or let them be null in the table.",
            )
        if missing and not add_columns:
            raise SchemaError(
                f"The table {self.name} has no {', '.join(field.name for field in missing)}.",
                todo="Add the columns to the table, or set add_columns=True.",
            )
        if missing:
            with self.errors("Adding columns to"):
                table.alter.add_columns(missing)

    def _made(self, schema: Any, partition_by: Sequence[str]) -> DeltaTable:
        # Not `is_deltatable`: it keeps Python's lock while it waits for the store.
        missing = self._delta.exceptions.TableNotFoundError
        with self.errors("Making"):
            try:
                return self._loaded()
            except missing:
                pass
            try:
                self._delta.DeltaTable.create(
                    self.name,
                    schema,
                    partition_by=list(partition_by),
                    storage_options=self._options,
                )
            except self._delta.exceptions.DeltaError:  # another driver may have been quicker
                try:
                    return self._loaded()
                except missing:
                    pass
                raise
            return self._loaded()

    def _loaded(self) -> DeltaTable:
        return self._delta.DeltaTable(self.name, storage_options=self._options)

    def _check_features(self, table: DeltaTable) -> None:
        features = set(table.protocol().writer_features or ()) - _FEATURES
        config = table.metadata().configuration
        keys = [
            key
            for key, value in config.items()
            if key.startswith(_NOT_FULFILLED) and value not in (None, "none")
        ]
        computed = [
            field.name
            for field in table.schema().fields
            if any(key.startswith(_COMPUTED) for key in field.metadata)
        ]
        if features or keys or computed:
            raise SchemaError(
                f"The table {self.name} has what this sink does not fulfil: "
                f"{', '.join(sorted({*features, *keys, *computed}))}.",
                todo="Write to a table without it, or by way of Spark: foreachBatch with "
                "backend.once.",
            )

    def version(self, application: str) -> int | None:
        """The newest that it has of an application."""
        return self._version(self.load(), application)

    def _version(self, table: DeltaTable, application: str) -> int | None:
        with self.errors("Reading"):
            return table.transaction_version(application)

    def append(self, files: Sequence[TableFile], application: str, place: Place) -> bool:
        """Name the files that the table does not have in one commit; False: look again."""
        table, version = self.load(), max(one.version for one in files)
        news = missing_in(self._version(table, application), files)
        if not news:
            return True
        check_there(place, news)
        partitions = table.metadata().partition_columns
        at = self._delta.transaction
        actions = [
            at.AddAction(
                path=one.path,
                size=one.size_bytes,
                partition_values=dict(zip(partitions, one.partition, strict=True)),
                modification_time=one.made_ms,
                data_change=True,
                stats=_stats_json(one.rows, one.stats),
            )
            for one in news
        ]
        properties = self._delta.CommitProperties(
            custom_metadata={"application": application, "applicationVersion": str(version)},
            max_commit_retries=0,
            app_transactions=[self._delta.Transaction(application, version)],
        )
        before = table.version()
        try:
            table.create_write_transaction(
                actions,
                mode="append",
                schema=table.schema(),
                partition_by=partitions,
                commit_properties=properties,
            )
        except (self._delta.exceptions.DeltaError, OSError) as error:  # the table's, the store's
            after = self.load()
            if not missing_in(self._version(after, application), files):
                return True  # it is in, whatever was said
            if after.version() == before:
                raise ConnectorError(
                    f"The table {self.name} took no commit: {error}.",
                    todo="Check that the driver may write to it, and that the store answers.",
                ) from error
            return False
        return True


def table_names(table: DeltaTable) -> list[str]:
    """Of its columns."""
    return [field.name for field in table.schema().fields]


def _name(field: Any) -> str:
    return str(getattr(field.type, "type", field.type))


def _stats_json(rows: int, stats: Mapping[str, tuple[int, Any, Any]]) -> str:
    """In the form of Delta's protocol."""
    bounded = {name: one for name, one in stats.items() if one[1] is not None}
    return msgspec.json.encode(
        {
            "numRecords": rows,
            "nullCount": {name: one[0] for name, one in stats.items()},
            "minValues": {name: one[1] for name, one in bounded.items()},
            "maxValues": {name: one[2] for name, one in bounded.items()},
        }
    ).decode()
