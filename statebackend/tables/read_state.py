"""Reading state as Arrow tables: `read_state`, `read_timers`, `states`, `epochs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from snapshot.formats.record import Manifest
from snapshot.storage.store_options import StoreOptions
from statebackend.schema.types import ddl_of
from statebackend.tables.state_scan import StatePlace, state_source, timer_source
from statebackend.tables.stored_job import find_job, restored_bytes, stored_states
from statebackend.work_done import Progress

__all__ = ["epochs", "read_state", "read_timers", "state_rows", "states"]


def read_state(
    uri: str,
    job: str | None = None,
    operator: str = "",
    state: str = "",
    *,
    epoch: int | None = None,
    savepoint: str | None = None,
    keys: Any = None,
    columns: Sequence[str] | None = None,
    options: StoreOptions | None = None,
    scratch_dir: str | None = None,
    progress: Progress | None = None,
) -> pa.RecordBatchReader:
    """One state of an operator, as a stream of Arrow batches; the job may run meanwhile.

    What is needed of the job is fetched before this returns, so that nothing is missing if the job
    cleans it: ``scratch_dir`` takes the state of the operator, or that of the subtasks which
    ``keys`` belong to. Of a savepoint, one subtask after the other is fetched. Memory: a batch.

    Args:
        uri: the folder of all jobs, as ``uri=`` of the query. job: its name.
        operator: its uid. state: its name. A reducing or aggregating state is a value state.
        epoch: one that the job retains; default: the newest durable one.
        savepoint: the URI of a savepoint, instead of ``uri`` and ``job``.
        keys: only these: a list of values (or tuples, of several key columns), or an Arrow table
            or record batch of the key columns.
        columns: only these, and in this order. ``value.n`` is a field of a struct.
        options: how S3 is reached.
        scratch_dir: a local folder for the time of reading; default: Python's.
        progress: told how many subtasks were fetched, and of how many.

    Returns:
        ``key_group``, ``key`` (a struct), of a list ``index``, of a map ``map_key``, ``value`` (a
        struct), and with a TTL ``expires_at_ms``: expired entries are there until they are removed.
        Elements of a list come in their order; ``index`` has gaps where elements expired. Of
        states of no key: ``subtask``, ``index``, ``value``, or ``map_key``, ``value``.

    Raises:
        SettingError: there is no such operator, state, or column; or keys of a state of no key.
        NotRestorableError: there is no such job or savepoint, or the epoch is not retained.
        FormatError: what is there does not read.
        StoreUnreachableError: from the store.
    """
    place = StatePlace(uri, job, epoch, savepoint, options, scratch_dir, progress)
    return place.reader(operator, lambda found: state_source(found, state, keys), columns)


def read_timers(
    uri: str,
    job: str | None = None,
    operator: str = "",
    *,
    epoch: int | None = None,
    savepoint: str | None = None,
    keys: Any = None,
    columns: Sequence[str] | None = None,
    options: StoreOptions | None = None,
    scratch_dir: str | None = None,
    progress: Progress | None = None,
) -> pa.RecordBatchReader:
    """An operator's timers: ``key_group``, ``key`` (a struct), ``at_ms``. See :func:`read_state`.

    Without ``keys`` they come in the order of their times within a key group.
    """
    place = StatePlace(uri, job, epoch, savepoint, options, scratch_dir, progress)
    return place.reader(operator, lambda found: timer_source(found, keys), columns)


_STATES: Final = pa.schema(
    [
        ("operator", pa.string()),
        ("state", pa.string()),
        ("kind", pa.string()),
        ("key_schema", pa.string()),
        ("map_key_schema", pa.string()),
        ("value_schema", pa.string()),
        ("ttl_ms", pa.int64()),
        ("epoch", pa.int64()),
        ("parallelism", pa.int32()),
        ("max_parallelism", pa.int32()),
        ("operator_bytes", pa.int64()),
    ]
)


def states(
    uri: str,
    job: str | None = None,
    *,
    epoch: int | None = None,
    savepoint: str | None = None,
    options: StoreOptions | None = None,
) -> pa.Table:
    """What states a job has, a row each. Reads the log alone. Args, raises: see `read_state`.

    ``operator_bytes``: what a restore of the operator reads, of all of its states together.
    """
    found = find_job(uri, job, epoch=epoch, savepoint=savepoint, options=options)
    rows = []
    for one in found.operators.values():
        of_operator = {
            "epoch": found.epoch,
            "parallelism": one.lineage.parallelism,
            "max_parallelism": one.lineage.max_parallelism,
            "operator_bytes": sum(
                restored_bytes(subtask, one.last.epoch) for subtask in one.lineage.subtasks
            ),
        }
        rows += [{**row, **of_operator} for row in state_rows(one.last)]
    return pa.Table.from_pylist(rows, schema=_STATES)


def state_rows(record: Manifest) -> list[dict[str, Any]]:
    """What a record declares, in the columns of `states` that are each state's own."""
    rows = []
    for name, state in sorted(stored_states(record).items()):
        declared = state.declared
        of_keys = not declared.of_operator
        rows.append(
            {
                "operator": record.operator,
                "state": name,
                "kind": declared.kind,
                "key_schema": _ddl_of(record.schemas.get("", "")) if of_keys else None,
                "map_key_schema": _ddl_of(declared.key_schema),
                "value_schema": _ddl_of(declared.value_schema),
                "ttl_ms": declared.ttl_ms if isinstance(declared.ttl_ms, int) else None,
            }
        )
    return rows


_EPOCHS: Final = pa.schema(
    [
        ("epoch", pa.int64()),
        ("operator", pa.string()),
        ("readable", pa.bool_()),
        ("stamp_ms", pa.int64()),
        ("watermark_ms", pa.int64()),
        ("next_timer_ms", pa.int64()),
        ("parallelism", pa.int32()),
        ("max_parallelism", pa.int32()),
    ]
)


def epochs(
    uri: str,
    job: str | None = None,
    *,
    savepoint: str | None = None,
    options: StoreOptions | None = None,
) -> pa.Table:
    """What epochs a job's log holds, a row for each operator of each. Reads the log alone.

    ``readable``: the epoch is whole in every operator, so ``epoch=`` may name it. ``stamp_ms``: the
    batch's own time. Args, raises: see `read_state`.
    """
    found = find_job(uri, job, savepoint=savepoint, options=options)
    rows = []
    for number in found.epochs():
        readable = found.holds(number)
        for uid, one in sorted(found.lineages.items()):
            entry = one.epochs.get(number)
            if entry is not None:
                rows.append(
                    {
                        "epoch": number,
                        "operator": uid,
                        "readable": readable,
                        "stamp_ms": entry.stamp_ms,
                        "watermark_ms": entry.watermark_ms,
                        "next_timer_ms": entry.next_timer_ms,
                        "parallelism": entry.parallelism,
                        "max_parallelism": one.max_parallelism,
                    }
                )
    return pa.Table.from_pylist(rows, schema=_EPOCHS)


def _ddl_of(schema_json: str) -> str | None:
    return ddl_of(schema_json) if schema_json else None
