"""The state of a table by the column: many keys in one call.

Columns are read from runs in memory as they are; where other things lie over the base, key by key.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from statebackend.state.binary_columns import (
    Entries,
    indices_of,
    newest,
    places_array,
    take,
    valid_bits,
)
from statebackend.state.blocks import binary_array
from statebackend.state.spill import Run
from statebackend.state.table import StateTable
from statebackend.state.table_base import BaseReads

__all__ = ["ColumnTable"]


class ColumnTable:
    """Reads and writes a table by the column.

    Attributes:
        table: that one.
        read_bytes: of values that were read.
    """

    def __init__(self, table: StateTable) -> None:
        self.table = table
        self._reads = BaseReads(table.base)
        self.read_bytes = 0

    def put_columns(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        """Set (or, where null, delete) many keys.

        Args:
            keys: strictly ascending.
        """
        if not len(keys):
            return
        if self.table.small_writes:
            self.table.entries.update(zip(keys.to_pylist(), values.to_pylist(), strict=True))
            return
        self.table.add_columns(keys, values)

    def put_values(self, keys: pa.BinaryArray, values: pa.BinaryArray | None) -> None:
        """As :meth:`put_columns`, of one state that is written by this alone; None deletes."""
        if not len(keys):
            return
        table = self.table
        if table.small_writes and table.decoded.put(
            table.overlays(), keys, values, self.get_columns
        ):
            return
        self.put_columns(keys, pa.nulls(len(keys), pa.binary()) if values is None else values)

    def get_values(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """As :meth:`get_columns`, of one state."""
        if len(keys) and self.table.small_writes:
            found = self.table.decoded.get(self.table.overlays(), keys, self._of_base)
            if found is not None:
                self.table.lookups += len(keys)
                self.read_bytes += found.nbytes
                return found
        return self.get_columns(keys)

    def get_columns(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """The values of ``keys``, null where there is none; quickest where they ascend."""
        sources = self.table.sources()
        if any(not isinstance(source, Run) or source.on_disk for source in sources):
            found = binary_array(self.table.multi_get(keys.to_pylist()))
            self.read_bytes += found.nbytes
            return found
        self.table.lookups += len(keys)
        if not sources:
            found = self._of_base(keys)
        else:
            found = self._of_columns(keys, [one for one in sources if isinstance(one, Run)])
        self.read_bytes += found.nbytes
        return found

    def _of_base(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        self.table.base_lookups += len(keys)
        return binary_array(self._reads.get(keys))

    def _of_columns(self, keys: pa.BinaryArray, runs: list[Run]) -> pa.BinaryArray:
        """As :meth:`get_columns`, where all that lies over the base is columns in memory."""
        wanted = np.arange(len(keys))
        place = np.empty(len(keys), np.int64)
        found: list[pa.BinaryArray] = []
        total = 0
        for run in runs:
            if not len(wanted):
                break
            run_keys, run_values = run.near(keys)
            if not len(run_keys):
                continue
            some = keys if len(wanted) == len(keys) else take(keys, wanted)
            at = pc.index_in(some, value_set=run_keys)
            here = valid_bits(at)
            if here.any():
                place[wanted[here]] = total + indices_of(at)[here]
                found.append(run_values)
                total += len(run_values)
                wanted = wanted[~here]
        if len(wanted):
            missing = keys if len(wanted) == len(keys) else take(keys, wanted)
            values = self._of_base(missing)
            if not found:
                return values
            place[wanted] = total + np.arange(len(wanted))
            found.append(values)
        elif not found:
            return self._of_base(keys)
        return pa.concat_arrays(found).take(places_array(place))

    def between(self, ranges: Sequence[tuple[bytes, bytes]]) -> Entries:
        """The live entries of ranges that ascend and do not overlap; perhaps others too."""
        table = self.table
        table.seal()
        keys = [key for some in table.base.scan_keys((a, b, b) for a, b in ranges) for key in some]
        parts = [(binary_array(keys), binary_array(table.base.multi_get(keys)))]
        earlier, own = table.sorted_runs()
        for run in (*earlier, *own):
            if not run.on_disk:
                parts.append(run.between(ranges[0][0], ranges[-1][1]))
                continue
            found = [entry for start, end in ranges for entry in run.scan(start, end)]
            parts.append((binary_array([k for k, _ in found]), binary_array([v for _, v in found])))
        full, data = newest(parts)
        self.read_bytes += full.nbytes + data.nbytes
        if data.null_count:
            live = np.flatnonzero(valid_bits(data))
            full, data = take(full, live), take(data, live)
        return full, data
