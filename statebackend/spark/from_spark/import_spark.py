"""Brings a query's state from Spark's own operators into a savepoint: `import_spark`."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator, Mapping
from operator import and_ as operator_and
from typing import Any, Final

import msgspec
import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from recovery.savepoints.savepoint import Savepoint
from snapshot.storage.store_options import StoreOptions
from statebackend.errors import NullKeyError, SettingError, UnsupportedQueryError
from statebackend.operators.rows.row_conversion import arrow_schema
from statebackend.spark.from_spark.reached_location import is_on_s3, reached
from statebackend.spark.from_spark.spark_checkpoint import SparkCheckpoint, open_checkpoint
from statebackend.spark.from_spark.spark_operators import (
    TIMERS,
    SparkOperator,
    spark_operators,
    time_mode_of,
    unread,
)
from statebackend.spark.from_spark.spark_state_reader import StateReader
from statebackend.state.ttl_cells import TTL
from statebackend.tables.given_operators import MAX_PARALLELISM, OperatorState
from statebackend.tables.savepoint_of_rows import write_saved_query
from statebackend.work_done import Progress, WorkDone

__all__ = ["ImportedOperator", "ImportedState", "SparkImport", "import_spark"]

# Spark does not keep how long an entry may live, only until when. It says how finely what expires
# is indexed; the processor's own is in force from the first epoch on.
_TTL: Final = TTL(60_000)


class ImportedState(msgspec.Struct, frozen=True, kw_only=True):
    """A state, or the timers, of an operator.

    Attributes:
        kind: value, list, map or timers.
        rows: how many there are: entries of a map, elements of a list; None: not counted.
        problem: why it does not come over; empty if it does.
    """

    name: str
    kind: str
    ttl: bool
    rows: int | None = None
    problem: str = ""


class ImportedOperator(msgspec.Struct, frozen=True, kw_only=True):
    """An operator.

    Attributes:
        number: Spark's `operatorId`. name: as Spark says it. uid: in the savepoint.
        problem: why it does not come over; empty if it does.
        timeout_needed: its keys have timeouts, and the import must be told of which kind.
    """

    number: int
    name: str
    uid: str
    states: list[ImportedState]
    problem: str = ""
    timeout_needed: bool = False


class SparkImport(msgspec.Struct, frozen=True, kw_only=True):
    """What came over, or would.

    Attributes:
        checkpoint: the location that it came from.
        query_id: of its query. epoch: the batch that the state is of.
        unfinished: the batch after it was planned and not committed; it is run again as planned.
        watermark_ms: in force in the batch after it; 0: none.
        savepoint: None after a dry run.
    """

    checkpoint: str
    query_id: str
    epoch: int
    unfinished: bool
    watermark_ms: int
    operators: list[ImportedOperator]
    savepoint: Savepoint | None = None

    @property
    def problems(self) -> list[str]:
        """Why it does not come over; empty if it does."""
        found = []
        for one in self.operators:
            what = f"operator {one.number} ({one.name})"
            if one.problem:
                found.append(f"{what}: {one.problem}")
            found += [
                f"state {state.name!r} of {what}: {state.problem}"
                for state in one.states
                if state.problem
            ]
        return found


def import_spark(
    spark: SparkSession,
    checkpoint: str,
    to: str,
    *,
    uid: str | Mapping[int, str] | None = None,
    timeout: str | Mapping[int, str] | None = None,
    dry_run: bool = False,
    parallelism: int = 1,
    max_parallelism: int = MAX_PARALLELISM,
    options: StoreOptions | None = None,
    scratch_dir: str | None = None,
    progress: Progress | None = None,
) -> SparkImport:
    """Write a savepoint of the state that Spark's own operators keep in a checkpoint location.

    The location is only read. The query must have been stopped: nothing in a location shows that a
    query waits there for data. The program then begins with the savepoint at a new checkpoint
    location, and goes on with the batch after the newest committed one, from the same offsets.

    Args:
        spark: a classic session; its `statestore` source reads the state.
        checkpoint: the query's ``checkpointLocation``. One on S3 that this Spark has no file
            system for is copied to ``scratch_dir`` first. to: the savepoint's folder, a URI; empty.
        uid: what the operator is called here: with `install` the class of its processor, or the
            name of its function. Of several operators, by Spark's `operatorId`.
        timeout: the ``timeoutConf`` of `applyInPandasWithState`, which Spark does not keep. It is
            needed where keys have timeouts. Of several operators, by `operatorId`.
        dry_run: count what would come over, and write nothing.
        parallelism: as `write_savepoint`, which has the arguments that follow, too.
        progress: told how many rows were read. Of how many, nobody knows.

    Returns: operator by operator what came over, or would.

    Raises:
        JobRunningError: a query of this driver runs there, or one went on meanwhile.
        CheckpointLocationError, NotRestorableError: it is no whole checkpoint location of Spark's.
        UnsupportedFormatError: of a form that is not known.
        UnsupportedQueryError: something does not come over; a dry run says so in its answer.
        SettingError: uid or timeout is missing, or of no operator; the folder is not empty.
        NullKeyError: a key is null in all of its columns; a dry run says so in its answer.
        StoreUnreachableError: from the store.
    """
    with reached(spark, checkpoint, options, scratch_dir) as place:
        found = open_checkpoint(spark, place)
        operators = spark_operators(spark, place)
        naming = _Naming(operators, uid, timeout)
        reading = _Reading(found, operators, naming, WorkDone(progress))
        planned = reading.answer()
        if dry_run:
            return reading.counted(planned)
        _refuse_problems(planned)
        naming.check()
        how = {"parallelism": parallelism, "max_parallelism": max_parallelism}
        of_target = None if is_on_s3(checkpoint) and not is_on_s3(to) else options
        savepoint = reading.written(to, options=of_target, scratch_dir=scratch_dir, **how)
        return msgspec.structs.replace(reading.answer(), savepoint=savepoint)


def _refuse_problems(planned: SparkImport) -> None:
    if planned.problems:
        raise UnsupportedQueryError(
            f"The state in {planned.checkpoint} does not come over: {'; '.join(planned.problems)}.",
            todo="Begin this query anew, or leave it with Spark. Nothing was written.",
        )


class _Naming:
    """What the caller says of operators, by Spark's number of each."""

    def __init__(
        self,
        operators: list[SparkOperator],
        uid: str | Mapping[int, str] | None,
        timeout: str | Mapping[int, str] | None,
    ) -> None:
        self._operators = operators
        self.uids, self._timeouts = self._by_number("uid", uid), self._by_number("timeout", timeout)

    def _by_number(self, name: str, given: str | Mapping[int, str] | None) -> Mapping[int, str]:
        numbers = [one.number for one in self._operators]
        if isinstance(given, str) and len(numbers) > 1:
            raise SettingError(
                f"{name}={given!r} is given for one operator, and there are {len(numbers)}: "
                f"{self._shown()}.",
                todo=f"Give it by operator: {name}={{{numbers[0]}: ..., {numbers[1]}: ...}} (on "
                f"the command line --{name} {numbers[0]}=... --{name} {numbers[1]}=...).",
            )
        found = dict.fromkeys(numbers, given) if isinstance(given, str) else dict(given or {})
        if unknown := sorted(found.keys() - set(numbers)):
            raise SettingError(
                f"{name}= is given for operator(s) {', '.join(map(str, unknown))}, which are not "
                f"there; there are: {self._shown()}.",
                todo="Give it by the operatorId that a dry run shows.",
            )
        return found

    def _shown(self) -> str:
        return ", ".join(f"{one.number} ({one.name})" for one in self._operators)

    def check(self) -> None:
        """Refuse to write an operator that nothing would find.

        Raises:
            SettingError: one has no uid, or two have the same.
        """
        missing = [one for one in self._operators if one.states and not self.uids.get(one.number)]
        if missing:
            raise SettingError(
                f"No uid is given for {', '.join(f'{m.number} ({m.name})' for m in missing)}.",
                todo="Give uid= (on the command line --uid): with install() it is the name of the "
                "processor's class, or of the function.",
            )
        if len(set(self.uids.values())) < len(self.uids):
            raise SettingError(
                f"Two operators are given one uid: {dict(self.uids)!r}.",
                todo="Give each its own.",
            )

    def lacks_timeout(self, operator: SparkOperator) -> bool:
        """Whether only the caller knows an operator's time mode, and has not said it."""
        return operator.time_mode is None and operator.number not in self._timeouts

    def mode(self, operator: SparkOperator, *, timed: bool) -> str:
        """An operator's time mode.

        Raises:
            SettingError: it is a function's, and not said.
        """
        if operator.time_mode is not None:
            return operator.time_mode
        timeout = self._timeouts.get(operator.number, "" if timed else "NoTimeout")
        mode = time_mode_of(timeout)
        if mode is None or (mode == "none") is timed:
            has = "has" if timed else "has no"
            raise SettingError(
                f"Operator {operator.number} ({operator.name}) {has} timeouts, and timeout= "
                f"(--timeout) is {timeout!r}.",
                todo="Give the timeoutConf of the program: EventTimeTimeout or "
                "ProcessingTimeTimeout."
                if timed
                else "Leave timeout= out.",
            )
        return mode


class _Reading:
    """The operators of one location, on their way."""

    def __init__(
        self,
        found: SparkCheckpoint,
        operators: list[SparkOperator],
        naming: _Naming,
        work: WorkDone,
    ) -> None:
        self._found, self._operators, self._naming = found, operators, naming
        self._work = work
        self._reader = StateReader.of(found)
        self._rows: dict[tuple[int, str], int] = {}
        self._problems: dict[tuple[int, str], str] = {}
        self._untold: set[int] = set()  # operators whose kind of timeouts must be told

    def answer(self) -> SparkImport:
        """What comes over, with the rows that were read so far."""
        found = self._found
        return SparkImport(
            checkpoint=found.path,
            query_id=found.query_id,
            epoch=found.epoch,
            unfinished=found.planned,
            watermark_ms=found.next_watermark_ms,
            operators=[
                ImportedOperator(
                    number=one.number,
                    name=one.name,
                    uid=self._naming.uids.get(one.number, ""),
                    problem=one.problem,
                    timeout_needed=one.number in self._untold,
                    states=[
                        ImportedState(
                            name=state.name,
                            kind=state.kind,
                            ttl=state.ttl,
                            problem=state.problem
                            or self._problems.get((one.number, state.name), ""),
                            rows=self._rows.get((one.number, state.name)),
                        )
                        for state in one.states
                    ],
                )
                for one in self._operators
            ],
        )

    def counted(self, planned: SparkImport) -> SparkImport:
        """The same after a dry run: what comes over was counted."""
        if planned.problems:
            return planned
        for one in self._operators:
            states, timers = self._reader.rows(one)
            if timers is not None and self._naming.lacks_timeout(one):
                self._untold.add(one.number)
            else:
                self._naming.mode(one, timed=timers is not None)
            for name, rows in {**states, **({} if timers is None else {TIMERS: timers})}.items():
                self._count(one, name, rows)
        return self.answer()

    def _count(self, operator: SparkOperator, name: str, rows: DataFrame) -> None:
        key: Any = rows.schema["key"].dataType
        empty = [F.col("key").getField(column).isNull() for column in key.names]
        without_key = F.count_if(functools.reduce(operator_and, empty))
        try:
            (found,) = rows.select(F.count(F.lit(1)), without_key).collect()
        except (PySparkException, Py4JJavaError) as error:
            raise self._unread(operator, name, error) from error
        self._rows[operator.number, name], null_keys = found
        self._work.add(self._rows[operator.number, name])
        if null_keys:
            self._problems[operator.number, name] = (
                f"in {null_keys} row(s) the key ({', '.join(key.names)}) is null, and no state is "
                f"kept here for such a key"
            )

    def written(self, to: str, **how: Any) -> Savepoint:
        """Write the savepoint. Raises and takes as `write_saved_query`."""
        stood = self._found.saved_query()
        try:
            return write_saved_query(
                to, self.operators(), stood, watermark_ms=stood.watermark_ms, **how
            )
        except NullKeyError as error:
            raise NullKeyError(
                f"The state in {self._found.path} does not come over: {error.what} Spark's "
                f"operators keep state for such a key, and these do not.",
                todo="Nothing was written. A dry run counts the keys. Bring the others over by "
                "hand, as docs/howto/move-a-spark-job.md says, and leave such rows out before the "
                "operator.",
            ) from error

    def operators(self) -> dict[str, OperatorState]:
        """As `write_savepoint` takes them; rows are read when they are written."""
        made = {}
        for one in self._operators:
            if not one.states:
                continue
            states, timers = self._reader.rows(one)
            expiring = {state.name: _TTL for state in one.states if state.ttl}
            made[self._naming.uids[one.number]] = OperatorState(
                one.key(states, timers),
                {name: self._batches(one, name, rows) for name, rows in states.items()},
                timers=None if timers is None else self._batches(one, TIMERS, timers),
                time_mode=self._naming.mode(one, timed=timers is not None),
                schemas={name: rows.schema["value"].dataType for name, rows in states.items()},  # type: ignore[misc]
                ttl=expiring,
            )
        return made

    def _batches(self, operator: SparkOperator, name: str, rows: DataFrame) -> Any:
        number = operator.number

        def count(read: int) -> None:
            self._rows[number, name] = self._rows.get((number, name), 0) + read
            self._work.add(read)

        count(0)
        return _reader(rows, count, lambda error: self._unread(operator, name, error))

    def _unread(self, operator: SparkOperator, name: str, error: Exception) -> Exception:
        return unread(self._found.path, _what(operator, name), error)


def _what(operator: SparkOperator, state: str) -> str:
    return f"{state!r} of operator {operator.number} ({operator.name})"


def _reader(
    rows: DataFrame,
    count: Callable[[int], None],
    refused: Callable[[Exception], Exception],
) -> pa.RecordBatchReader:
    """A frame as batches: Spark's tasks encode them, one partition at a time comes here."""
    schema = arrow_schema(rows.schema)

    def batches() -> Iterator[pa.RecordBatch]:
        encoded = rows.mapInArrow(_encoded, "batch binary")
        try:
            for row in encoded.toLocalIterator():
                with pa.ipc.open_stream(row.batch) as stream:
                    table = stream.read_all().cast(schema)
                count(table.num_rows)
                yield from table.to_batches()
        except (PySparkException, Py4JJavaError) as error:
            raise refused(error) from error

    return pa.RecordBatchReader.from_batches(schema, batches())


def _encoded(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        yield pa.RecordBatch.from_pydict({"batch": [sink.getvalue()]})
