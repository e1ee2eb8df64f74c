"""`spark.read.format("statebackend")`: a job's state as a DataFrame, read by Spark's tasks.

Options are named as those of Spark's own `statestore` source where it has them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from snapshot.storage.store_options import StoreOptions
from statebackend.errors import NotRestorableError, ObjectNotFoundError, SettingError
from statebackend.operators.rows.row_conversion import struct_type
from statebackend.spark.data_sources import registered
from statebackend.tables.read_state import epochs, states
from statebackend.tables.state_scan import (
    ChosenColumns,
    StatePlace,
    StateSource,
    state_source,
    timer_source,
)
from statebackend.tables.stored_job import StoredJob, StoredOperator

__all__ = ["SOURCE_NAME", "StateTableSource", "register"]

SOURCE_NAME: Final = "statebackend"
_OPTIONS: Final = (
    "path",
    "job",
    "savepoint",
    "batchId",
    "operator",
    "stateVarName",
    "state",
    "readRegisteredTimers",
    "metadata",
    "keys",
    "keyGroups",
    "columns",
    "s3Endpoint",
    "s3Region",
    "scratchDir",
)


def register(spark: SparkSession) -> None:
    """Make the format `statebackend` known to a session.

    Where there is a `StateBackend` or an `install`, ``spark.read.format("statebackend")`` calls it
    by itself. SQL (``USING statebackend``) and processes without a backend need the call. The first
    one in a JVM takes a second or more: Spark looks for sources in Python then.

        spark.read.format("statebackend").option("job", "clicks").option("operator", "counter")
            .option("state", "count").load("s3://bucket/state")

    Without ``operator`` there is a row for each state, as `statebackend.states` gives it, or with
    ``metadata=epochs`` one for each operator of each epoch, as `statebackend.epochs`.

    Options:
        path: the folder of all jobs (`load(path)`). job: its name.
        savepoint: the URI of a savepoint, instead of the two.
        batchId: an epoch that the job retains; default: the newest durable one.
        operator: its uid. state: the state (or ``stateVarName``, as Spark's own source has it).
        readRegisteredTimers: true: its timers instead.
        metadata: states (default) or epochs, without an operator.
        keys: only these, a JSON list: of values, or of lists where there are several key columns.
        keyGroups: only these, as in `0-63` or `5`.
        columns: only these, as in `key.user,value.n`.
        s3Endpoint, s3Region: of the store. scratchDir: where tasks put what they fetch.

    There is a partition for each subtask of the operator. All tasks read the epoch that was the
    newest when the query began: a job that runs must retain it for so long
    (``spark.statebackend.retainEpochs``). Equality with ``key`` fields and with
    ``key_group`` is used to fetch less where ``spark.sql.python.filterPushdown.enabled`` is on.
    """
    registered(spark, StateTableSource)


@dataclass(frozen=True)
class _Request:
    """What the options say."""

    place: StatePlace
    operator: str
    state: str
    timers: bool
    metadata: str
    keys: tuple[Any, ...] | None
    groups: range | None
    columns: tuple[str, ...] | None

    @classmethod
    def of(cls, options: Mapping[str, str]) -> _Request:
        """As Spark hands them over.

        Raises:
            SettingError: one that is not known, or does not parse.
        """
        known = {name.lower(): name for name in _OPTIONS}
        given = {}
        for name, value in options.items():
            if name.lower() not in known:
                raise SettingError(
                    f"The format statebackend has no option {name!r}.",
                    todo=f"Its options are: {', '.join(_OPTIONS)}.",
                )
            given[known[name.lower()]] = value
        if {"state", "stateVarName"} <= given.keys():
            raise SettingError(
                "The options state and stateVarName are one.", todo="Give one of them."
            )
        epoch = given.get("batchId")
        place = StatePlace(
            given.get("path", ""),
            given.get("job"),
            None if epoch is None else _parsed("batchId", epoch, int),
            given.get("savepoint"),
            StoreOptions(
                endpoint_url=given.get("s3Endpoint", ""), region=given.get("s3Region", "")
            ),
            given.get("scratchDir"),
        )
        columns = given.get("columns")
        return cls(
            place,
            given.get("operator", ""),
            given.get("state", given.get("stateVarName", "")),
            _parsed("readRegisteredTimers", given.get("readRegisteredTimers", "false"), _flag),
            _parsed("metadata", given.get("metadata", "states"), _metadata_name),
            _parsed("keys", given["keys"], _keys) if "keys" in given else None,
            _parsed("keyGroups", given["keyGroups"], _groups) if "keyGroups" in given else None,
            tuple(name.strip() for name in columns.split(",")) if columns else None,
        )

    def source(self, operator: StoredOperator) -> StateSource:
        """What is read of the operator."""
        if self.timers == bool(self.state):
            raise SettingError(
                f"Of the operator {self.operator!r}, "
                + ("both a state and timers are asked for." if self.timers else "no state is."),
                todo="Give the option state, or readRegisteredTimers=true.",
            )
        found = (
            timer_source(operator, self.keys)
            if self.timers
            else state_source(operator, self.state, self.keys)
        )
        groups = None if self.groups is None else frozenset(self.groups)
        return replace(found, groups=groups)


@dataclass
class _Part(InputPartition):
    """One subtask of the operator after an epoch; None: what belongs to no key, or the states.

    ``chain``: its lineage digest, by which another evaluation of the epoch is told.
    """

    epoch: int
    subtask: int | None
    chain: str | None = None


class StateTableSource(DataSource):
    """See `register`."""

    @classmethod
    def name(cls) -> str:
        """What `format` takes."""
        return SOURCE_NAME

    def schema(self) -> StructType:
        """Of the state, as its log declares it."""
        request = _Request.of(self.options)
        if not request.operator:
            return struct_type(_metadata(request).schema)
        found = request.place.find()
        source = request.source(found.operator(request.operator))
        return struct_type(ChosenColumns(source.schema, request.columns).schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Reads it."""
        # Spark refuses a reader that takes filters while pushing them is off, and tells a source
        # nothing of its settings: who asks is all that shows it.
        asked_by = sys._getframe(1).f_code.co_filename
        filtering = asked_by.endswith("data_source_pushdown_filters.py")
        return (_FilteredReader if filtering else _Reader)(_Request.of(self.options))


class _Reader(DataSourceReader):
    def __init__(self, request: _Request) -> None:
        self._request = request

    def partitions(self) -> Sequence[InputPartition]:
        """One for each subtask that holds something of it."""
        request = self._request
        if not request.operator:
            return [_Part(-1, None)]
        found: StoredJob = request.place.find()
        source = request.source(found.operator(request.operator))
        if source.rows is None:
            return [_Part(found.epoch, None)]
        subtasks = source.operator.lineage.subtasks
        parts = [
            _Part(found.epoch, n, subtasks[n].chain_at(found.epoch)) for n in source.subtasks()
        ]
        return parts or [_Part(found.epoch, None)]  # Spark wants one at least

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one, in a task."""
        assert isinstance(partition, _Part)
        request = self._request
        if not request.operator:
            yield from _metadata(request).to_batches()
            return
        place = request.place
        if place.savepoint is None:
            place = replace(place, epoch=partition.epoch)
        try:
            reader = place.reader(
                request.operator,
                lambda one: _of_part(request.source(one), partition),
                request.columns,
            )
        except (NotRestorableError, ObjectNotFoundError) as error:
            named = place.savepoint is not None or request.place.epoch is not None
            if named or isinstance(error, _EvaluatedAgainError):
                raise
            raise NotRestorableError(
                f"Epoch {partition.epoch} of the job is not there any more: the job went on, and "
                f"cleaned it, while Spark's tasks read it.",
                todo="Have the job retain more epochs (spark.statebackend.retainEpochs), or read a "
                "savepoint.",
            ) from error
        yield from reader


class _EvaluatedAgainError(NotRestorableError):
    """What some of the tasks have read is not the epoch any more."""


def _of_part(source: StateSource, part: _Part) -> StateSource:
    """What one task reads.

    Raises:
        NotRestorableError: the epoch was evaluated again since the partitions were made.
    """
    if part.subtask is None:
        return replace(source, only=frozenset())
    subtasks = source.operator.lineage.subtasks
    is_there = part.subtask < len(subtasks)
    if not is_there or subtasks[part.subtask].chain_at(part.epoch) != part.chain:
        raise _EvaluatedAgainError(
            f"Epoch {part.epoch} of operator {source.operator.uid!r} was evaluated again.",
            todo="Read it again.",
        )
    return replace(source, only=frozenset({part.subtask}))


class _FilteredReader(_Reader):
    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:
        """Take from filters which keys and key groups are wanted; Spark evaluates all of them."""
        equal = {one.attribute: (one.value,) for one in filters if type(one).__name__ == "EqualTo"}
        equal |= {one.attribute: one.value for one in filters if type(one).__name__ == "In"}
        request = self._request
        if not request.operator:
            return filters
        groups = equal.get(("key_group",), ())
        if len(groups) == 1 and request.groups is None:
            request = replace(request, groups=range(int(groups[0]), int(groups[0]) + 1))
        names = request.place.find().operator(request.operator).key_schema.names
        # Nothing is equal to null.
        known = {
            name: [one for one in equal.get(("key", name), ()) if one is not None] for name in names
        }
        if request.keys is None and request.state and all(known.values()):
            values = list(known.values())
            if len(names) == 1:
                request = replace(request, keys=tuple(values[0]))
            elif all(len(one) == 1 for one in values):
                request = replace(request, keys=(tuple(one[0] for one in values),))
        self._request = request
        return filters


def _metadata(request: _Request) -> pa.Table:
    place = request.place
    if request.metadata == "epochs":
        return epochs(place.uri, place.job, savepoint=place.savepoint, options=place.options)
    return states(
        place.uri, place.job, epoch=place.epoch, savepoint=place.savepoint, options=place.options
    )


def _parsed(name: str, text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except (ValueError, TypeError) as error:
        raise SettingError(
            f"The option {name} is {text!r} ({error}).",
            todo="See statebackend.register for what it takes.",
        ) from None


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("neither true nor false")
    return text.lower() == "true"


def _metadata_name(text: str) -> str:
    if text not in ("states", "epochs"):
        raise ValueError("neither states nor epochs")
    return text


def _keys(text: str) -> tuple[Any, ...]:
    found = json.loads(text)
    if not isinstance(found, list):
        raise ValueError("no JSON list")
    return tuple(tuple(one) if isinstance(one, list) else one for one in found)


def _groups(text: str) -> range:
    first, dash, last = text.partition("-")
    found = range(int(first), int(last if dash else first) + 1)
    if not found:
        raise ValueError("the last comes before the first")
    return found
