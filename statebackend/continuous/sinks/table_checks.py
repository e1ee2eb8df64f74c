"""What lake tables of every format have in common: columns, partitions and errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa

from statebackend.errors import ConnectorError, SchemaError

__all__ = ["check_partition_names", "nullable", "table_errors"]


def nullable(schema: pa.Schema) -> pa.Schema:
    """Every column may be null: a later schema may leave it out."""
    return pa.schema([field.with_nullable(True) for field in schema])


def check_partition_names(columns: Sequence[str], partition_by: Sequence[str]) -> None:
    """Refuse partition columns that the rows do not have.

    Raises:
        SchemaError: naming the first.
    """
    for name in partition_by:
        if name not in columns:
            raise SchemaError(
                f"partition_by names {name!r}, which the rows do not have.",
                todo=f"They have {', '.join(columns)}.",
            )


@contextmanager
def table_errors(
    table: str,
    what: str,
    kinds: tuple[type[Exception], ...],
    *,
    passed_on: tuple[type[Exception], ...] = (),
    todo: str,
) -> Iterator[None]:
    """Turns what a table's library raises into a `ConnectorError` that names the table.

    Args:
        what: is done with it. kinds: of errors. passed_on: those of them that stay as they are.
    """
    try:
        yield
    except passed_on:
        raise
    except kinds as error:
        raise ConnectorError(
            f"{what} the table {table} failed: {type(error).__name__}: {error}.", todo=todo
        ) from error
