"""An Iceberg table as a sink, by pyiceberg: each checkpoint is one snapshot, exactly once.

The sink's version is a property of the table, set by the very commit that adds the files: it
outlives expired snapshots. A commit succeeds only if the table's current snapshot is still the one
in which the version was looked up. pyiceberg would put a refused commit on top of the newer
snapshot without looking (see apache/iceberg issue 14425): so its own tries are switched off, and
after each conflict the sink looks again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
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
    EnvironmentMissingError,
    SchemaError,
    SettingError,
    StateBackendError,
)
from statebackend.schema.types import arrow_schema
from statebackend.system import SYSTEM
from statebackend.texts import install_extra

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

__all__ = ["IcebergSink"]

_TODO: Final = "Check pyiceberg's configuration on the driver, and that the table is there."
_NO_RETRIES: Final = {"commit.retry.num-retries": "0"}
_PROPERTY: Final = "statebackend.version."  # and the application
Options = Mapping[str, str]


class IcebergSink(TableSink):
    """Appends to an Iceberg table, exactly once; needs the extra ``iceberg``.

    Each checkpoint in which rows came is one snapshot. The table is made when the job is built, if
    the catalog does not have it. Files of checkpoints that were never completed go with the table's
    next removal of orphan files, which must keep files for longer than the job may stand still.
    """

    def __init__(
        self,
        table: str,
        *,
        catalog: str = "default",
        partition_by: Sequence[str] = (),
        add_columns: bool = False,
        target_file_bytes: int = TARGET_BYTES,
        catalog_properties: Callable[[], Options] | None = None,
    ) -> None:
        """Name the table; nothing is opened.

        Args:
            table: such as ``shop.counts``: namespace and name.
            catalog: as pyiceberg's configuration on the driver names it.
            partition_by: columns whose values are partitions, for a table that is made. One that is
                there has its own partitions, by any transform but ``bucket``.
            add_columns: add to the table what its schema lacks, when the job is built.
            target_file_bytes: a new file is begun when one has so many, before compression. There
                is at least one for each checkpoint, subtask and partition in which rows came.
            catalog_properties: gives more of the catalog's properties, on the driver alone.

        Raises:
            SettingError: no name of a table, or no size.
        """
        check_target(target_file_bytes)
        if "." not in table.strip("."):
            raise SettingError(
                f"{table!r} is no name of an Iceberg table.",
                todo='Give namespace and name, such as "shop.counts".',
            )
        self._name, self._catalog = table, catalog
        self._properties = catalog_properties
        self._partition_by = list(partition_by)
        self._add_columns = add_columns
        self._target_bytes = target_file_bytes
        self._place: Place | None = None
        self._transforms: list[tuple[str, str]] = []

    def __repr__(self) -> str:
        return f"IcebergSink({self._name!r}, catalog={self._catalog!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_properties": None}  # credentials stay on the driver

    def check(self, schema: T.StructType) -> None:
        """Make the table, or check that the one that is there takes these rows.

        Raises:
            EnvironmentMissingError: pyiceberg is not installed.
            SchemaError: the table has other columns, or partitions that this sink cannot fill.
            ConnectorError: the catalog or the table cannot be used.
        """
        with closing(self._table()) as opened:
            table = opened.prepare(
                arrow_schema(schema), self._partition_by, add_columns=self._add_columns
            )
        self._place = Place(_data_folder(table))
        self._transforms = _transforms(table)

    def open(self, context: SinkContext) -> SinkWriter:
        """A writer of data files."""
        assert self._place is not None  # `check` came first
        return TableWriter(
            self._place,
            context,
            split=split_by(self._partition_values, ()) if self._transforms else None,
            names_partitions=False,  # pyiceberg reads them from the files' own bounds
            target_bytes=self._target_bytes,
            wall_ms=SYSTEM.wall_ms,
        )

    def _partition_values(self, batch: pa.RecordBatch) -> list[pa.Array]:
        return [_transformed(batch.column(name), how) for name, how in self._transforms]

    def committer(self, job: str, uid: str) -> Committer:
        """Adds the files to the table."""
        assert self._place is not None
        return TableCommitter(self._place, self._table())

    def _table(self) -> _Table:
        return _Table(self._name, self._catalog, self._properties)


def _data_folder(table: Table) -> str:
    return str(table.properties.get("write.data.path") or f"{table.location()}/data")


def _transforms(table: Table) -> list[tuple[str, str]]:
    """Of the table's partitions: source column and transform.

    Raises:
        SchemaError: a file's bounds do not tell its partition.
    """
    found = []
    for field in table.spec().fields:
        name, transform = table.schema().find_column_name(field.source_id), field.transform
        if str(transform) == "void":
            continue
        if name is None or "." in name or not transform.preserves_order:
            raise SchemaError(
                f"The table is partitioned by {transform}({name}), which this sink cannot fill.",
                todo="Partition by a column of its own, its day, hour, month or year, or by "
                "truncate.",
            )
        found.append((name, str(transform)))
    return found


def _transformed(column: pa.Array, transform: str) -> pa.Array:
    if transform == "identity":
        return column
    from pyiceberg.io.pyarrow import pyarrow_to_schema
    from pyiceberg.transforms import parse_transform

    schema = pa.schema([pa.field("x", column.type, metadata={"PARQUET:field_id": "1"})])
    of = pyarrow_to_schema(schema).fields[0].field_type
    return parse_transform(transform).pyarrow_transform(of)(column)


class _Table:
    """One Iceberg table; every call reads its newest metadata."""

    def __init__(self, name: str, catalog: str, properties: Callable[[], Options] | None) -> None:
        try:
            import pyiceberg.catalog
            import pyiceberg.exceptions
        except ImportError as error:
            raise EnvironmentMissingError(
                f"IcebergSink needs the package pyiceberg: {error}.",
                todo=install_extra("iceberg", "on the driver and on every executor"),
            ) from error
        self.name = name
        self._exceptions = pyiceberg.exceptions
        with self._errors("Opening the catalog of"):
            self._catalog: Catalog = pyiceberg.catalog.load_catalog(
                catalog, **(dict(properties()) if properties else {})
            )

    def close(self) -> None:
        """A catalog in a database keeps connections."""
        self._catalog.close()

    def _errors(self, what: str, *passed_on: type[Exception]) -> AbstractContextManager[None]:
        ours: tuple[type[Exception], ...] = (StateBackendError, *passed_on)
        return table_errors(self.name, what, (Exception,), passed_on=ours, todo=_TODO)

    def prepare(self, want: pa.Schema, partition_by: Sequence[str], *, add_columns: bool) -> Table:
        """Make the table, or check that it takes these rows, adding columns where that is asked."""
        with self._errors("Looking for"):
            there = self._catalog.table_exists(self.name)
        if not there:
            return self._made(want, partition_by)
        table = self.load()
        change = table.transaction()
        invalid = self._exceptions.ValidationError
        try:
            comparing = self._errors("Comparing the rows with", invalid)
            with comparing, change.update_schema() as update:
                update.union_by_name(nullable(want))
        except invalid as error:
            raise SchemaError(
                f"The table {self.name} does not take such rows: {error}.",
                todo="Change output_schema, or write to another table.",
            ) from error
        have, then = table.schema(), change.table_metadata.schema()
        kept = {field.name: field for field in have.fields}
        changed = [field.name for field in then.fields if kept.get(field.name) != field]
        if changed and not add_columns:
            raise SchemaError(
                f"The table {self.name} has no such columns as {', '.join(changed)} of the rows.",
                todo="Change the table or the rows, or set add_columns=True.",
            )
        needed = [
            field.name for field in have.fields if field.required and field.name not in want.names
        ]
        if needed:
            raise SchemaError(
                f"The table {self.name} wants {', '.join(needed)}, which the rows do not have.",
                todo="Give the rows these columns, or make them optional in the table.",
            )
        if changed:
            with self._errors("Adding columns to"):
                change.commit_transaction()
            table = self.load()
        return table

    def _made(self, want: pa.Schema, partition_by: Sequence[str]) -> Table:
        check_partition_names(want.names, partition_by)
        with self._errors("Making"):
            self._catalog.create_namespace_if_not_exists(self.name.rpartition(".")[0])
            # With its partitions at once: a start that was cut off between would leave it without.
            made = self._catalog.create_table_transaction(self.name, nullable(want))
            with made.update_spec() as update:
                for name in partition_by:
                    update.add_identity(name)
            made.commit_transaction()
        return self.load()

    def load(self) -> Table:
        with self._errors("Reading"):
            return self._catalog.load_table(self.name)

    def version(self, application: str) -> int | None:
        """The newest that it has of an application."""
        return self._version(self.load(), application)

    def _version(self, table: Table, application: str) -> int | None:
        said = table.properties.get(f"{_PROPERTY}{application}")
        return None if said is None else int(said)

    def append(self, files: Sequence[TableFile], application: str, place: Place) -> bool:
        """Add the files that the table does not have in one commit; False: look again."""
        table, version = self.load(), max(one.version for one in files)
        news = missing_in(self._version(table, application), files)
        if not news:
            return True
        check_there(place, news)
        # In this copy of the metadata alone: what is committed are the changes below.
        table.metadata = table.metadata.model_copy(
            update={"properties": {**table.properties, **_NO_RETRIES}}
        )
        said = {"statebackend.application": application, "statebackend.version": str(version)}
        overtaken = self._exceptions.CommitFailedException, self._exceptions.ValidationError
        try:
            with self._errors("Committing to", *overtaken), table.transaction() as change:
                change.set_properties({f"{_PROPERTY}{application}": str(version)})
                change.add_files(
                    [f"{place.url}/{one.path}" for one in news], said, check_duplicate_files=False
                )
        except overtaken:
            return False  # another commit came between, of which nothing is known yet
        return True
