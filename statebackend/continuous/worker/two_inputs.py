"""Two inputs that share their keys, as the one input of an operator: columns of both, side by side.

The columns of an operator of two inputs: ``side`` (0 left, 1 right), the keys ``k0..``, the left
side's columns ``l0..``, the right side's ``r0..``, and ``t``, the event time, where it is asked
for; as `statebackend.spark.frames.two_input_frames.united_sides` makes them in micro-batches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.types import ByteType, StructField, StructType

from statebackend.errors import SchemaError
from statebackend.operators.rows.row_conversion import arrow_schema

__all__ = ["Side", "united"]


@dataclass(frozen=True)
class Side:
    """One of the two.

    Attributes:
        number: 0 left, 1 right. schema: of both together.
        key_positions: of its keys. event_position: of its event time; None: it has none.
        first: where its own columns begin.
    """

    number: int
    schema: StructType
    key_positions: tuple[int, ...]
    event_position: int | None
    first: int

    @functools.cached_property
    def _arrow(self) -> pa.Schema:
        return arrow_schema(self.schema)

    def shown(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Its rows in the columns of both: what is not its own is null."""
        known: dict[int, pa.Array] = {
            0: pa.array([self.number], pa.int8()).take(pa.array([0] * rows.num_rows, pa.int32()))
        }
        for place, position in enumerate(self.key_positions, start=1):
            known[place] = rows.column(position)
        known |= dict(enumerate(rows.columns, start=self.first))
        if self.event_position is not None:
            known[len(self.schema) - 1] = rows.column(self.event_position)
        columns = [
            known[place].cast(field.type) if place in known else pa.nulls(rows.num_rows, field.type)
            for place, field in enumerate(self._arrow)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._arrow)


def united(
    left: StructType,
    right: StructType,
    left_keys: tuple[int, ...],
    right_keys: tuple[int, ...],
    event_time: str | None,
) -> tuple[Side, Side, int | None]:
    """Both sides, and where the event time is.

    Raises:
        SchemaError: the keys do not have the same types, or no side has the event time.
    """
    kinds = [
        [schema[position].dataType for position in keys]
        for schema, keys in ((left, left_keys), (right, right_keys))
    ]
    if kinds[0] != kinds[1]:
        shown = [", ".join(kind.simpleString() for kind in side) for side in kinds]
        raise SchemaError(
            f"The keys of the two sides differ: ({shown[0]}) and ({shown[1]}).",
            todo="Key both streams by columns of the same types.",
        )
    if event_time is not None and event_time not in {*left.names, *right.names}:
        raise SchemaError(
            f"Neither side has a column {event_time!r}.", todo="Name the event-time column."
        )
    fields = [StructField("side", ByteType())]
    fields += [StructField(f"k{i}", kind) for i, kind in enumerate(kinds[0])]
    first = len(fields)
    for letter, of in (("l", left), ("r", right)):
        fields += [StructField(f"{letter}{i}", one.dataType) for i, one in enumerate(of)]
    if event_time is not None:
        having = left if event_time in left.names else right
        fields.append(StructField("t", having[event_time].dataType))
    schema = StructType(fields)

    def side(number: int, of: StructType, keys: tuple[int, ...], begins: int) -> Side:
        position = of.names.index(event_time) if event_time in of.names else None
        return Side(number, schema, keys, position, begins)

    return (
        side(0, left, left_keys, first),
        side(1, right, right_keys, first + len(left)),
        None if event_time is None else len(schema) - 1,
    )
