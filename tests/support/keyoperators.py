"""Operators of one flavour on their own, as an epoch makes them: a reader, a writer, a loop."""

from __future__ import annotations

from pyspark.sql.types import StructType

from statebackend.operators.pandas_frames.frame_reader import FrameReader, FrameWriter
from statebackend.operators.per_key_loop import KeyOperator
from statebackend.operators.rows.row_reader import RowReader
from statebackend.operators.rows.row_writer import RowWriter
from statebackend.state.key_cursor import KeyCursor


class RowOperator(KeyOperator):
    """The operator of a row processor.

    Args:
        uid: the operator, for errors.
        cursor: told which key is current.
        input_schema: the columns a processor sees, in order.
        key_positions: where the key columns stand among them.
        output_schema: of the rows that the processor returns.
        timezone: the session's, in which timestamps are shown.
    """

    def __init__(
        self,
        *,
        uid: str,
        cursor: KeyCursor,
        input_schema: StructType,
        key_positions: tuple[int, ...],
        output_schema: StructType,
        timezone: str = "UTC",
    ) -> None:
        super().__init__(
            uid=uid,
            cursor=cursor,
            reader=RowReader(input_schema, key_positions, timezone=timezone),
            writer=RowWriter(output_schema, lambda: f"The processor of operator {uid!r}"),
        )


class FrameOperator(KeyOperator):
    """The operator of a pandas processor.

    Args:
        uid: the operator, for errors.
        cursor: told which key is current.
        input_schema: the columns a processor sees, in order.
        key_positions: where the key columns stand among them.
        output_schema: of the frames that the processor returns.
        timezone: the session's.
        max_rows: of a frame, and of a record batch of output.
        by_name: see :class:`FrameWriter`.
    """

    def __init__(
        self,
        *,
        uid: str,
        cursor: KeyCursor,
        input_schema: StructType,
        key_positions: tuple[int, ...],
        output_schema: StructType,
        timezone: str,
        max_rows: int = 10_000,
        by_name: bool = True,
    ) -> None:
        super().__init__(
            uid=uid,
            cursor=cursor,
            reader=FrameReader(input_schema, key_positions, timezone=timezone, max_rows=max_rows),
            writer=FrameWriter(
                output_schema,
                lambda: f"The processor of operator {uid!r}",
                timezone=timezone,
                max_rows=max_rows,
                by_name=by_name,
            ),
        )
