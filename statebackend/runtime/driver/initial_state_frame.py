"""The static frame that an operator starts from, checked against the stream's keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from statebackend.errors import SchemaError
from statebackend.operators.rows.row_conversion import arrow_schema

__all__ = ["InitialState"]


@dataclass(frozen=True)
class InitialState:
    """A static frame that an operator starts from; ``key_positions`` of its columns."""

    frame: DataFrame
    key_positions: tuple[int, ...]

    @classmethod
    def given(
        cls, frame: Any, names: list[str], rows: StructType, keys: list[str]
    ) -> InitialState | None:
        """Of what the user gave, checked; None for None. ``keys``: the key columns of ``rows``.

        Raises:
            SchemaError: what is wrong with it.
        """
        if frame is None:
            return None
        return cls.of(frame, names, StructType([rows[name] for name in keys]))

    @classmethod
    def of(cls, frame: Any, names: list[str], key_schema: StructType) -> InitialState:
        """Checked: it has the key columns, with the types of the stream's.

        Args:
            frame: a static DataFrame, or what its ``groupBy`` gave.

        Raises:
            SchemaError: what is wrong with it.
        """
        # Spark's transformWithState takes grouped data: its frame is what counts here.
        frame = getattr(frame, "_df", frame)
        if not isinstance(frame, DataFrame) or frame.isStreaming:
            raise SchemaError(
                "The initial state is not a static DataFrame.",
                todo="Give initial_state= a frame that spark.read or createDataFrame made.",
            )
        positions = []
        for name, wanted in zip(names, key_schema.fields, strict=True):
            found = [i for i, column in enumerate(frame.columns) if column == name]
            if len(found) != 1 or frame.schema[found[0]].dataType != wanted.dataType:
                raise SchemaError(
                    f"The initial state has no column {name!r} of type "
                    f"{wanted.dataType.simpleString()} ({frame.schema.simpleString()}).",
                    todo="Give it the key columns of the stream, by the same names and types.",
                )
            positions.append(found[0])
        arrow_schema(frame.schema)
        return cls(frame, tuple(positions))
