"""A vectorised processor under test: record batches in, a table out, on the real store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.types import StructField, StructType, TimestampNTZType, TimestampType

from statebackend.errors import SettingError, UsageError, ValueMismatchError
from statebackend.key_hashing import key_groups
from statebackend.keygroups import subtask_of
from statebackend.operators.arrow_calls import record_arrow_states
from statebackend.operators.declared_states import EpochTimes, parse_schema
from statebackend.operators.epoch_phases import StatefulEpoch
from statebackend.operators.input.group_by_key import Groups, group_part
from statebackend.operators.input.lateness import LateRows
from statebackend.operators.input.staging import Part
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.operators.rows.row_conversion import arrow_schema, struct_type
from statebackend.schema.conform import conform_all
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.state.binary_columns import take
from statebackend.testing.tested_keys import KeySpace
from statebackend.testing.tested_operator import UID, OperatorUnderTest

__all__ = ["ArrowOperatorUnderTest"]


class _Epoch(StatefulEpoch):
    """A real epoch whose output is kept."""

    def outputs(
        self,
        parts: Sequence[Groups],
        initial: Sequence[Groups],
        dropped: list[int],
        rules: Iterator[Any] | None,
    ) -> list[Any]:
        """All batches that the processor gives in the epoch."""
        return list(self.run(iter(parts), initial=iter(initial), dropped=dropped))


class ArrowOperatorUnderTest(OperatorUnderTest):
    """Runs the epochs of an ``ArrowProcessor``.

    Args:
        key_schema: of the key: its names are those of the batches' key columns.
        output_schema: of what the processor gives.
        event_time: the column by which rows are late; in event time only.

    Raises:
        SettingError: a schema is missing.
    """

    epoch_type = _Epoch

    def __init__(
        self,
        processor: Any,
        *,
        time_mode: str,
        key_schema: StructType | str | None,
        output_schema: StructType | str | None,
        event_time: str | None,
        max_parallelism: int,
    ) -> None:
        if key_schema is None or output_schema is None:
            missing = "keySchema" if key_schema is None else "outputSchema"
            raise SettingError(
                f"{missing} is missing for an ArrowProcessor.",
                todo="Give keySchema (which names the key columns) and outputSchema, such as "
                "'user string, total double'.",
            )
        output = parse_schema(output_schema, "the output")
        super().__init__(
            processor,
            flavour="arrow",
            time_mode=time_mode,
            record=record_arrow_states,
            keys=KeySpace(key_schema, max_parallelism),
            check=lambda batches: batches,
        )
        self._plan = replace(self._plan, output_schema=output)
        self._fields = arrow_schema(output)
        self._event_time = event_time
        self._late_ms = 0
        self._first: pa.Table | None = None  # the initial state, of which nothing is late
        # Of the batches at hand; as in a query without any, there are the key's columns at least.
        self._input = self._initial = self.keys.schema

    def table(self, batches: Sequence[pa.RecordBatch]) -> pa.Table:
        """An epoch's output."""
        return pa.Table.from_batches(batches, schema=self._fields)

    def run(
        self,
        times: EpochTimes,
        items: Any = (),
        *,
        initial: Any = (),
        everywhere: bool = False,
        rules: Sequence[Any] = (),
    ) -> list[Any]:
        """As :meth:`OperatorUnderTest.run`; items and initial state are batches, or empty."""
        self._late_ms = times.late_watermark_ms
        if isinstance(items, pa.RecordBatch | pa.Table):
            self._input, items = self._conformed(items)
        if isinstance(initial, pa.RecordBatch | pa.Table):
            self._initial, initial = self._conformed(initial)
            self._first = initial
        return super().run(times, items, initial=initial, everywhere=everywhere, rules=rules)

    def _planned(self, *, initial: bool) -> OperatorPlan:
        return replace(
            self._plan,
            input_schema=self._input,
            key_positions=self._positions(self._input),
            initial_schema=self._initial if initial else None,
            initial_key_positions=self._positions(self._initial) if initial else (),
        )

    def _positions(self, schema: StructType) -> tuple[int, ...]:
        return tuple(schema.names.index(name) for name in self.keys.schema.names)

    def _conformed(self, batch: Any) -> tuple[StructType, pa.Table]:
        """A batch as Spark would hand it over, and its schema."""
        names = batch.schema.names
        missing = [name for name in self.keys.schema.names if name not in names]
        if missing or len(set(names)) != len(names):
            raise ValueMismatchError(
                f"A batch has the columns ({', '.join(names)}); the key is "
                f"({', '.join(self.keys.schema.names)}).",
                todo="Give batches that have each column of keySchema, and no name twice.",
            )
        own = {field.name: field.dataType for field in self.keys.schema}
        try:
            found = struct_type(batch.schema)
        except PySparkException as error:
            raise ValueMismatchError(
                f"A batch has a column of a type that Spark has not ({error}).",
                todo="Cast it to one that Spark has.",
            ) from error
        # Nullable, as the columns of a stream are.
        schema = StructType([StructField(f.name, own.get(f.name, f.dataType)) for f in found])
        table = pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch
        arrays = conform_all(table.columns, schema)
        return schema, pa.Table.from_arrays(arrays, names=names)

    def _parts(self, items: Any, subtasks: int) -> dict[int, Groups]:
        """The input of each subtask that has some, grouped as a query groups it."""
        if not isinstance(items, pa.Table) or not items.num_rows:
            return {}
        positions = tuple(items.schema.names.index(name) for name in self.keys.schema.names)
        columns = [items.column(place).combine_chunks() for place in positions]
        codec, groups_max = KeyCodec(self.keys.schema), self.keys.max_parallelism
        codec.encode_arrow(columns)  # refuses keys that are null
        groups = key_groups(columns, groups_max)
        owners = np.array([subtask_of(g, subtasks, groups_max) for g in range(groups_max)])[groups]
        late = None if items is self._first else self._late(items)
        parts = {}
        for subtask in range(subtasks):
            rows = np.flatnonzero(owners == subtask)
            if len(rows):
                part = Part(take(items, rows), groups[rows])
                found = group_part(part, codec.encode_arrow, positions, late)
                if found is not None:
                    parts[subtask] = found
        return parts

    def _late(self, table: pa.Table) -> LateRows | None:
        name = self._event_time
        if name is None:
            return None
        place = table.schema.get_field_index(name)
        schema = self._input
        if place < 0 or not isinstance(schema[name].dataType, TimestampType | TimestampNTZType):
            raise UsageError(
                f"eventTime={name!r} is no timestamp column of the batch "
                f"({schema.simpleString()}), as operator {UID!r} needs.",
                todo="Give batches with that column, as timestamps.",
            )
        return LateRows(place, self._late_ms)
