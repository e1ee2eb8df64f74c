"""What a processor under test gave: as it is, or checked and converted as a query would."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from statebackend.errors import ValueMismatchError
from statebackend.operators.rows.row_conversion import collected_rows
from statebackend.operators.rows.row_writer import RowWriter
from statebackend.testing.tested_operator import UID

__all__ = ["OutputCheck"]


def _who() -> str:
    return f"The processor of operator {UID!r}"


class OutputCheck:
    """Looks at the output of an epoch.

    Args:
        schema: that it must fit; None: any will do.
        rows_only: even without a schema it must be tuples.
    """

    def __init__(self, schema: StructType | None, *, rows_only: bool) -> None:
        self._schema = schema
        self._rows_only = rows_only

    def __call__(self, output: list[Any], *, pandas: bool) -> list[Any]:
        """The output to return.

        Args:
            pandas: it is DataFrames.

        Raises:
            ValueMismatchError: it does not fit.
        """
        if self._schema is not None:
            return self._frames(output) if pandas else self._rows(output)
        bad = [row for row in output if not isinstance(row, tuple)] if self._rows_only else ()
        if bad:
            raise ValueMismatchError(
                f"{_who()} returned {bad[0]!r}, which is no row.",
                todo="Yield one tuple per row.",
            )
        return output

    def _rows(self, output: list[Any]) -> list[Any]:
        assert self._schema is not None
        batches = _written(RowWriter(self._schema, _who), output)
        if not batches:
            return []
        return collected_rows(pa.Table.from_batches(batches), self._schema)

    def _frames(self, output: list[Any]) -> list[Any]:
        from statebackend.operators.pandas_frames.frame_reader import (
            FrameReader,  # they import pandas
        )
        from statebackend.operators.pandas_frames.frame_writer import FrameWriter

        assert self._schema is not None
        batches = _written(FrameWriter(self._schema, _who, timezone="UTC"), output)
        reader = FrameReader(self._schema, (), timezone="UTC")
        return [f for batch in batches for f in reader.piece(pa.Table.from_batches([batch]))]


def _written(writer: Any, output: list[Any]) -> list[pa.RecordBatch]:
    batches = list(writer.collect(output))
    if writer.pending:
        batches.append(writer.take())
    return batches
