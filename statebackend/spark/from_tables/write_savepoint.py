"""Makes a savepoint out of tables: `write_savepoint`."""

from __future__ import annotations

from collections.abc import Mapping

from recovery.savepoints.location_files import LocationFiles
from recovery.savepoints.savepoint import Savepoint
from snapshot.storage.store_options import StoreOptions
from statebackend.spark.from_tables.slices_on_spark import SlicesOnSpark, slices_on_spark
from statebackend.system import SYSTEM, System
from statebackend.tables.given_operators import MAX_PARALLELISM, OperatorState
from statebackend.tables.given_sources import stood_at
from statebackend.tables.savepoint_of_rows import write_saved_query

__all__ = ["write_savepoint"]


def write_savepoint(
    to: str,
    operators: Mapping[str, OperatorState],
    *,
    parallelism: int | None = None,
    max_parallelism: int = MAX_PARALLELISM,
    on_spark: bool | None = None,
    watermark_ms: int | None = None,
    sources: str | LocationFiles | None = None,
    options: StoreOptions | None = None,
    scratch_dir: str | None = None,
    system: System = SYSTEM,
) -> Savepoint:
    """Write tables as a savepoint, which a job can begin with: ``StateBackend(savepoint=...)``.

    Spark's tasks write large Spark frames, each a range of key groups; this process writes all
    else. Memory: a batch, the states that belong to no key, and in this process a whole Spark
    frame. A folder in ``scratch_dir`` takes an operator's state, or a task's range, meanwhile.

    Args:
        to: the savepoint's folder, a URI; empty. All hosts must reach it if tasks write.
        operators: by uid.
        parallelism: in how many parts the state is written; a job may have another one. Default: 1,
            with tasks ``spark.sql.shuffle.partitions`` if set, else Spark's cores.
        max_parallelism: key groups. The job that begins with it has so many.
        on_spark: whether tasks write the operators that have a Spark frame. Default: those whose
            frames have over 64 MiB by Spark's estimate, and no `RecordBatchReader` beside them.
        watermark_ms: in force; timers of event time at or before it fire in the first batch.
        sources: the URI of a savepoint, or of the checkpoint location of a query that has stopped.
            The new query reads on where those stood after the last committed batch. Default: it
            reads its sources from their start.
        options: how S3 is reached.
        scratch_dir: a local folder of the driver, and of the executors if tasks write.

    Returns: the savepoint: the same, whoever writes it.

    Raises:
        SettingError: there is no operator, an argument is of no use, or something lies in the
            folder already.
        SchemaError, ValueMismatchError, NullKeyError: rows that are no state.
        CheckpointLocationError, NotRestorableError: ``sources`` is no checkpoint location, or no
            batch of it is committed.
        StoreUnreachableError: from the store.

    Where it fails, what was written is removed: `savepoint.json` comes last.
    """
    stood = None if sources is None else stood_at(sources, options, system)
    tasks = slices_on_spark(operators, on_spark, to, options, scratch_dir)
    return write_saved_query(
        to,
        operators,
        stood,
        watermark_ms=watermark_ms,
        parallelism=_parallelism(parallelism, tasks, max_parallelism),
        max_parallelism=max_parallelism,
        options=options,
        scratch_dir=scratch_dir,
        system=system,
        keyed=tasks,
    )


def _parallelism(given: int | None, tasks: SlicesOnSpark | None, most: int) -> int:
    if given is not None:
        return given
    return 1 if tasks is None else min(tasks.tasks, most)
