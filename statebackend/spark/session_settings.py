"""What Spark's sessions are set to while a query is started; they are set back after it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from statebackend.errors import UnsupportedQueryError
from statebackend.spark.start.checkpoint_location import FILE_MANAGER

__all__ = [
    "check_batches_kept",
    "default_parallelism",
    "few_rows_at_once",
    "frame_limits",
    "keeps_avro",
    "retried_whole",
    "runs_without_data",
    "set_for_a_start",
    "set_for_a_while",
    "wanted_at_start",
    "warn_of_partial_retries",
]

_log = logging.getLogger("statebackend.spark")
# Spark runs a stage again in part if an executor was lost with its output. The rows may then come
# in another order or, after a function that is not deterministic, be others. So all that is behind
# that stage must run again whole: otherwise some subtasks have the first evaluation in their state
# and some the second. Spark compares checksums of a stage's output for that. They are off by
# default in 4.1. A user may have them off for other queries; ours always have them on.
_RETRIED_WHOLE: Final = {
    "spark.sql.shuffle.orderIndependentChecksum.enabled": "true",
    "spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch": "true",
}
# Spark turns adaptive execution off for stateful queries of its own; ours would be planned three
# times in each batch, to the same plan.
_ALWAYS: Final = {
    "spark.sql.streaming.unsupportedOperationCheck": "false",
    "spark.sql.adaptive.enabled": "false",
    **_RETRIED_WHOLE,
}
# Spark asks for a batch's size in bytes before each row of it, which takes a quarter of the JVM's
# time. Where the number of rows bounds it, it need not; this value says so.
_BATCH_BYTES: Final = "spark.sql.execution.arrow.maxBytesPerBatch"
_NO_LIMIT: Final = str((1 << 31) - 1)

_KEPT: Final = "spark.sql.streaming.minBatchesToRetain"
_KEPT_MIN: Final = 2

_PARTITIONS: Final = "spark.sql.shuffle.partitions"
_WITHOUT_DATA: Final = "spark.sql.streaming.noDataMicroBatches.enabled"
_ENCODING: Final = "spark.sql.streaming.stateStore.encodingFormat"
_ROWS: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
_ROWS_MAX: Final = 10_000


def frame_limits(session: SparkSession) -> tuple[int, int]:
    """The most rows, and the most bytes, of a pandas frame, by Spark's settings."""
    rows = int(session.conf.get(_ROWS, "10000") or 0)
    try:
        found: Any = session._jsparkSession.sessionState().conf()
        size_bytes = int(found.arrowMaxBytesPerBatch())
    except Py4JError as error:  # a release of Spark without it
        _log.debug("%s cannot be read (%s)", _BATCH_BYTES, error)
        size_bytes = int(_NO_LIMIT)
    return (rows if rows > 0 else 1 << 31), size_bytes


def default_parallelism(session: SparkSession) -> int:
    """Subtasks of an operator: ``spark.sql.shuffle.partitions`` if that is set, else Spark's cores.

    Spark's own default is 200 partitions, whatever the cluster. Each of ours has a store of its
    own, so a small cluster would spend its time with opening them.
    """
    said = session.conf.get(_PARTITIONS, None)
    return int(said) if said else max(session.sparkContext.defaultParallelism, 1)


def keeps_avro(df: DataFrame) -> bool:
    """Whether Spark would keep the state of a query of its own in Avro."""
    return str(df.sparkSession.conf.get(_ENCODING, None)).lower() == "avro"


def runs_without_data(session: SparkSession) -> bool:
    """Whether Spark is to run a batch for timers and the watermark alone."""
    return str(session.conf.get(_WITHOUT_DATA, "true")).lower() != "false"


def few_rows_at_once(sessions: Sequence[SparkSession]) -> bool:
    """Whether Spark gives no more rows to Python at once than it does by default."""
    said = [int(one.conf.get(_ROWS, "10000") or 0) for one in sessions]
    return all(0 < rows <= _ROWS_MAX for rows in said)


def check_batches_kept(sessions: Sequence[SparkSession], *, asynchronous: bool) -> None:
    """Warn if Spark keeps too few batches in its location for a query to go back by one.

    Raises:
        UnsupportedQueryError: with asynchronous commits, which rely on it after each crash.
    """
    said = {one.conf.get(_KEPT, None) for one in sessions}
    kept = min((int(one) for one in said if one is not None), default=_KEPT_MIN)
    if kept >= _KEPT_MIN:
        return
    what = (
        f"{_KEPT} is {kept}: once Spark has planned a batch, it removes what it would need to "
        f"repeat the one before"
    )
    if asynchronous:
        raise UnsupportedQueryError(
            f'{what}. With commit="async" the query could not be started again after a crash.',
            todo=f'Set it to {_KEPT_MIN} or more (its default is 100), or use commit="sync".',
        )
    _log.warning(
        "%s; a query whose output was read in part cannot be started again then, and savepoints "
        "cannot be taken while it runs: set it to %d or more (its default is 100)",
        what,
        _KEPT_MIN,
    )


def wanted_at_start(*, narrow: bool, file_manager: str | None) -> dict[str, str]:
    """What a query takes along of its session.

    Args:
        narrow: all rows that go to Python are so narrow that their number bounds a batch's bytes.
        file_manager: see :meth:`CheckpointLocation.file_manager`.
    """
    settings = dict(_ALWAYS)
    if narrow:
        settings[_BATCH_BYTES] = _NO_LIMIT
    if file_manager is not None:
        settings[FILE_MANAGER] = file_manager
    return settings


@contextlib.contextmanager
def set_for_a_start(sessions: Sequence[SparkSession], wanted: Mapping[str, str]) -> Iterator[None]:
    """While open the sessions have these settings; what a user has set stays, but for `_ALWAYS`."""
    with contextlib.ExitStack() as stack:
        for one in sessions:
            for name, value in wanted.items():
                said = one.conf.get(name, None)
                if name in _ALWAYS or said is None:
                    stack.callback(_set_back, one, name, said)
                    one.conf.set(name, value)
        yield


@contextlib.contextmanager
def set_for_a_while(session: SparkSession, name: str, value: str | None) -> Iterator[None]:
    """Give a session a setting while this is open; None: unset it."""
    said = session.conf.get(name, None)
    try:
        _set_back(session, name, value)
        yield
    finally:
        _set_back(session, name, said)


@contextlib.contextmanager
def retried_whole(session: SparkSession, lock: AbstractContextManager[Any]) -> Iterator[None]:
    """While open, Spark runs what is behind a stage that gave other rows again whole.

    Args:
        lock: held if the session's settings must be changed for that.
    """
    if all(_is_on(session, name) for name in _RETRIED_WHOLE):
        yield
        return
    with lock, set_for_a_start([session], _RETRIED_WHOLE):
        yield


def _is_on(session: SparkSession, name: str) -> bool:
    try:
        return session.conf.get(name) == "true"
    except PySparkException:  # this release does not know it
        return False


def warn_of_partial_retries(session: SparkSession) -> None:
    """Warn if this release of Spark lacks the settings that have stages retried whole."""
    unknown = [name for name in _RETRIED_WHOLE if not session.conf.isModifiable(name)]
    if unknown:
        _log.warning(
            "This release of Spark does not know %s. If functions before an operator are not "
            "deterministic and an executor is lost, the state may be a mix of two evaluations.",
            " and ".join(unknown),
        )


def _set_back(session: SparkSession, name: str, said: str | None) -> None:
    try:
        if said is None:
            session.conf.unset(name)
        else:
            session.conf.set(name, said)
    except Exception as error:  # the query's own error is the one to be seen
        _log.warning("%s could not be set back (%s)", name, error)
