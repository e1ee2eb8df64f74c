"""Writes the keyed state of a savepoint in Spark's tasks.

There are two stages. The first turns each frame's rows into entries of a store, with the code that
one process uses too. Spark sorts them by subtask, key and row. The second stage writes each
subtask's slice into the savepoint's folder. Every attempt of a task writes objects of its own, and
only those that the task reports to the driver become part of the savepoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from snapshot.storage.store_options import StoreOptions
from statebackend.errors import SettingError, SparkConnectError, error_in_text
from statebackend.runtime.driver.services import Services
from statebackend.spark.from_tables.slice_tasks import (
    ENTRIES,
    WRITTEN,
    EntryTask,
    SliceTask,
    WrittenSlice,
)
from statebackend.spark.session_settings import default_parallelism, retried_whole
from statebackend.tables.given_operators import GivenOperator, OperatorState
from statebackend.tables.given_rows import SparkRows
from statebackend.tables.savepoint_of_rows import KeyedSlices, in_one_process, list_heads
from statebackend.tables.savepoint_writer import SavepointWriter

__all__ = ["SlicesOnSpark", "slices_on_spark"]

_LARGE_BYTES: Final = 64 << 20
_NUMBER: Final = "__statebackend_number"


def slices_on_spark(
    operators: Mapping[str, OperatorState],
    wanted: bool | None,
    to: str,
    options: StoreOptions | None,
    scratch_dir: str | None,
) -> SlicesOnSpark | None:
    """Which operators Spark's tasks write; None: this process writes all of them.

    Args:
        wanted: every one that has a Spark frame, or none; None: those that are large.

    Raises:
        SettingError, SparkConnectError: tasks are asked for, and cannot do it.
    """
    if wanted is False:
        return None
    with_frames = {uid: frames for uid, one in operators.items() if (frames := _frames(one))}
    if wanted is None:
        chosen = {
            uid: frames
            for uid, frames in with_frames.items()
            if _why_not(uid, operators[uid], to) is None
            and sum(map(_estimated_bytes, frames)) > _LARGE_BYTES
        }
    else:
        chosen = with_frames
        _refuse(operators, chosen, to)
    if not chosen:
        return None
    session = next(iter(chosen.values()))[0].sparkSession
    return SlicesOnSpark(session, frozenset(chosen), to, options, scratch_dir or "")


def _frames(one: OperatorState) -> list[DataFrame]:
    return [rows for rows in (*one.states.values(), one.timers) if hasattr(rows, "toArrow")]


def _refuse(
    operators: Mapping[str, OperatorState], chosen: Mapping[str, list[DataFrame]], to: str
) -> None:
    if not chosen:
        raise SettingError(
            "on_spark=True was given, and no operator has a Spark frame.",
            todo="Leave on_spark= out, or give frames.",
        )
    for uid in chosen:
        if (why := _why_not(uid, operators[uid], to)) is not None:
            raise why


def _why_not(uid: str, one: OperatorState, to: str) -> SettingError | SparkConnectError | None:
    """Why tasks cannot write an operator."""
    if any(isinstance(rows, pa.RecordBatchReader) for rows in (*one.states.values(), one.timers)):
        return SettingError(
            f"Operator {uid!r} was given a RecordBatchReader beside Spark frames, and Spark's "
            f"tasks cannot read it.",
            todo="Give a table or a frame in its place, or on_spark=False.",
        )
    if to.startswith("memory:"):
        return SettingError(
            f"Spark's tasks cannot write to {to}: it is in the memory of this process.",
            todo="Give another folder, or on_spark=False.",
        )
    if any(not hasattr(frame, "_jdf") for frame in _frames(one)):
        return SparkConnectError(
            f"Operator {uid!r} was given a frame of Spark Connect, which no tasks are known to "
            f"write.",
            todo="Give on_spark=False, or use a classic session.",
        )
    return None


def _estimated_bytes(frame: DataFrame) -> int:
    """How large Spark thinks it is."""
    plan: Any = frame._jdf.queryExecution().optimizedPlan()
    return int(str(plan.stats().sizeInBytes()))


@dataclass(frozen=True)
class SlicesOnSpark:
    """Writes what operators hold of keys; see the module.

    Attributes:
        uids: those that tasks write; this process writes the others.
        to, options: of the savepoint's folder.
        scratch_dir: of the executors; empty: their default.
    """

    session: SparkSession
    uids: frozenset[str]
    to: str
    options: StoreOptions | None
    scratch_dir: str

    @property
    def tasks(self) -> int:
        """How many are right for this session."""
        return default_parallelism(self.session)

    def __call__(
        self, writer: SavepointWriter, uid: str, given: GivenOperator, folder: Path
    ) -> KeyedSlices:
        """See `KeyedWriter`.

        Raises:
            ValueMismatchError, NullKeyError: a row that does not fit.
            SettingError: the folder is not one that all hosts share.
        """
        if uid not in self.uids:
            return in_one_process(writer, uid, given, folder)
        of = given.parallelism, given.max_parallelism
        task = SliceTask(
            self.to, self.options, self.scratch_dir, writer.maker, uid, of, list_heads(given)
        )
        sorted_entries = (
            self._entries(given)
            .repartitionById(of[0], "subtask")
            .sortWithinPartitions("entry", "number")
            .select("entry", "stored")
        )
        written = self._run(sorted_entries.mapInArrow(task, WRITTEN))
        writer.adopt(one.entry for one in written)
        found = {one.entry.subtask: one.entry for one in written}
        slices = [
            found[subtask]
            if subtask in found
            else writer.slice(uid, subtask, of, lambda: iter(()), folder)
            for subtask in range(of[0])
        ]
        due = [one.next_timer_ms for one in written if one.next_timer_ms is not None]
        return KeyedSlices(slices, min(due, default=None))

    def _entries(self, given: GivenOperator) -> DataFrame:
        of = given.parallelism, given.max_parallelism
        parts = [self._made(EntryTask(given.key, one, of), rows) for one, rows in given.states]
        parts.append(self._made(EntryTask(given.key, None, of), given.timers))
        found = [part for part in parts if part is not None]
        return reduce(DataFrame.unionAll, found)

    def _made(self, task: EntryTask, rows: Iterator[pa.RecordBatch]) -> DataFrame | None:
        """The entries of a frame, or of a table that is here; None: there are none."""
        if isinstance(rows, SparkRows):
            # Counts on over partitions in the order in which they would come to the driver.
            number = F.monotonically_increasing_id().alias(_NUMBER)
            frame: DataFrame = rows.frame
            return frame.select("*", number).mapInArrow(task, ENTRIES)
        made, first = [], 0
        for batch in rows:
            if batch.num_rows:
                made.append(task.entries(batch, first))
                first += batch.num_rows
        return self.session.createDataFrame(pa.Table.from_batches(made), ENTRIES) if made else None

    def _run(self, frame: DataFrame) -> list[WrittenSlice]:
        context = self.session.sparkContext
        tag = f"statebackend-savepoint-{id(frame)}"
        context.addJobTag(tag)
        try:
            # A stage that is lost with its executor may give other rows when it runs again.
            with retried_whole(self.session, Services.starting):
                rows = frame.collect()
        except (PySparkException, Py4JJavaError) as error:
            if (ours := error_in_text(str(error))) is not None:
                raise ours from error
            raise
        except BaseException:  # Ctrl-C
            context.cancelJobsWithTag(tag)
            raise
        finally:
            context.removeJobTag(tag)
        return [msgspec.json.decode(row.slice, type=WrittenSlice) for row in rows]
