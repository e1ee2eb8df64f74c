"""The anchor: what gives a stateful ``mapInArrow`` its place, its identity and its barrier.

A small cached frame of two rows per subtask stands at the right of a right outer shuffle hash join:

* *locality*: its cached blocks pin subtask p to one executor;
* *identity*: the row that joins the stream says which subtask this is, never the partition id;
* *barrier*: the row that nothing joins is emitted last, and only when the stream side ended well.

Surrogates are ints that Spark's hash partitioning sends to partition p: one (data) that rows of
subtask p carry, and one (barrier) that no row carries.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from statebackend.keygroups import check_parallelism
from statebackend.operators.errors import lost_jvm as jvm
from statebackend.operators.input.packing import GROUP
from statebackend.schema.ddl import quoted
from statebackend.spark.frames.key_hash_expression import key_group_expression, surrogates
from statebackend.spark.worker.epoch_input import CONTROL_COLUMNS, NONCE_BITS
from statebackend.system import SYSTEM
from statebackend.threads import THREADS, Future

__all__ = ["Anchor", "anchored"]

_log = logging.getLogger("statebackend.spark")
# Spark prints it, in a line on a join, where a query is started without its backend.
_SURROGATE = "start_it_with_backend_write_stream"
_KEY_GROUP, _SUBTASK, _STAMP = CONTROL_COLUMNS
_PLANNED_UNDER: Final = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.optimizer.disableHints": "false",  # the join's hint is read here
    "spark.sql.shuffle.partitions": "1",  # for one subtask; more say their number themselves
}


_filling: Final = THREADS.lock()


class Anchor:
    """The cached frame for one parallelism; made when first needed, shared by operators."""

    def __init__(self, spark: SparkSession, parallelism: int) -> None:
        self.parallelism, self._context = parallelism, spark.sparkContext
        self.data_values, barrier_values = surrogates(parallelism)
        rows = [(value, subtask) for subtask, value in enumerate(self.data_values)]
        rows += [(value, ~subtask) for subtask, value in enumerate(barrier_values)]
        # In a session of its own: settings of the user's do not change how this is planned.
        session = spark.newSession()
        for name, value in _PLANNED_UNDER.items():
            session.conf.set(name, value)
        # Not createDataFrame(), which makes its session the active one.
        values = ", ".join(map(str, rows))
        frame = session.sql(f"VALUES {values} AS anchor({_SURROGATE}, {_SUBTASK})")
        if parallelism > 1:
            frame = frame.repartition(parallelism, _SURROGATE)
        else:
            # repartition(1, ...) gives Spark's SinglePartition. A join of two such inputs shuffles
            # both again, to spark.sql.shuffle.partitions, unless both are known to be small. Rows
            # that must be distinct are partitioned by hash, also at one partition, and a join keeps
            # to that whatever the sizes.
            frame = _as_it_lies(frame.dropDuplicates([_SURROGATE]))
        # Spark warns of a plan that it caches already: that of another backend's.
        self.frame = frame if frame.storageLevel.useMemory else frame.cache()
        # In a cold JVM it takes a second or two, in which the driver can do other things. It is no
        # WorkQueue: nobody should wait for it when the process ends.
        self._tag = f"statebackend-anchor-{SYSTEM.new_id()}"
        self._filled: Future[None] = THREADS.future()
        THREADS.start(self._fill_in_background, "statebackend-anchor")

    def _fill_in_background(self) -> None:
        try:
            self._fill()
        except BaseException as error:
            _log.info("the anchor is not filled, and the start tries again (%s)", error)
            self._filled.set_exception(error)
        else:
            self._filled.set_result(None)

    def _fill(self) -> None:
        context = self._context
        # One after the other: another backend's of this parallelism may be the same cached frame.
        with _filling, jvm.calls():
            context.setJobDescription(f"statebackend: a place for each of {self.parallelism}")
            context.addJobTag(self._tag)
            try:
                # frame.count() would plan and compile an aggregate as well: seconds in a cold JVM.
                self.frame._jdf.queryExecution().toRdd().count()
            finally:  # the thread may be one with others' in the JVM
                context.removeJobTag(self._tag)
                context.setJobDescription(None)  # type: ignore[arg-type]

    def ready(self) -> None:
        """Wait until each subtask has its place. Before a query is started.

        If the job in the background was cancelled or failed, it runs once more here.

        Raises:
            SparkLostError: Spark's JVM is gone.
            Exception: what else ended Spark's job.
        """
        if self._filled.exception() is not None:
            self._fill()

    def release(self) -> None:
        """Let the cached blocks go."""
        if not self._filled.done():
            self._context.cancelJobsWithTag(self._tag)
        self.frame.unpersist()


def _as_it_lies(frame: DataFrame) -> DataFrame:
    """``frame`` with the partitioning that it has now, also if another session plans it again.

    That happens once its cache was cleared. Spark does the same after a checkpoint, by methods that
    are not public.
    """
    java: Any = frame.sparkSession._jvm
    session: Any = frame.sparkSession._jsparkSession
    jdf: Any = frame._jdf
    try:
        sql = java.org.apache.spark.sql
        scans = getattr(getattr(sql.execution, "LogicalRDD$"), "MODULE$")
        datasets = getattr(getattr(sql.classic, "Dataset$"), "MODULE$")
        rows = jdf.queryExecution().toRdd()
        try:
            scan = scans.fromDataset(rows, jdf, False)
        except Py4JError:  # from 4.3 on it also asks whether the rows were checkpointed
            scan = scans.fromDataset(rows, jdf, False, False)
        return DataFrame(datasets.ofRows(session, scan), frame.sparkSession)
    except Py4JError as error:
        _log.debug("the anchor must not lose its cache: %s", error)
        return frame


def anchored(
    df: DataFrame, keys: list[str] | None, anchor: Anchor, max_parallelism: int
) -> DataFrame:
    """``df`` with each row at its subtask, and our control columns at the end.

    Args:
        keys: names of key columns of ``df``; None: its rows are payloads, whose last column says
            where they go (see :mod:`statebackend.operators.input.packing`).
    """
    parallelism = anchor.parallelism
    check_parallelism(parallelism, max_parallelism)
    # By position from here on: mapInArrow cannot take a name with a dot in it.
    names = df.columns if keys is not None else [name for name in df.columns if name != GROUP]
    places = [f"c{i}" for i in range(len(names))]
    columns = [F.col(quoted(n)).alias(p) for n, p in zip(names, places, strict=True)]
    # Not foldable, whatever the key: a constant one would let Catalyst turn the join into a
    # nested loop, and several tasks would own one subtask.
    unfoldable = F.spark_partition_id() * F.lit(0)
    # Never null; but of a batch without data only a frame of nulls may be left (the heartbeat's).
    group = F.coalesce(F.col(GROUP), F.lit(0))
    if keys is not None:
        group = key_group_expression([F.col(quoted(name)) for name in keys], max_parallelism)
    routed = df.select(*columns, (group + unfoldable).alias(_KEY_GROUP))
    subtask = F.floor(F.col(_KEY_GROUP) * F.lit(parallelism) / F.lit(max_parallelism))
    values = F.array(*[F.lit(value) for value in anchor.data_values])
    routed = routed.withColumn(_SURROGATE, F.element_at(values, subtask.cast("int") + F.lit(1)))
    # As the anchor is: where the join is left to shuffle its input, Spark may shuffle the anchor
    # (adaptive execution off, another spark.sql.shuffle.partitions), and there is no barrier.
    routed = routed.repartition(parallelism, _SURROGATE)
    # The stamp is made of what Spark puts into each batch's plan anew: a frame of another batch
    # carries another one. It writes both parts into generated code as numbers, and code that
    # differs is compiled anew and starts cold. Functions of arrays with a lambda for two are
    # interpreted instead; and it stands on the anchor's side, where that is done for two rows a
    # subtask.
    marker = F.array(F.col(_SUBTASK))
    stamp = F.zip_with(marker, marker, _barrier_stamp)[0].alias(_STAMP)
    stamped = anchor.frame.select(_SURROGATE, _SUBTASK, stamp)
    # A join hint that the user gave to the stream would come up to this join, and win. A merge join
    # emits the barrier before rows, and a broadcast join broadcasts every batch. The outermost hint
    # of a side counts. Spark cannot follow this one in an outer join, so it follows the anchor's.
    routed = routed.hint("shuffle_replicate_nl")
    joined = routed.join(stamped.hint("shuffle_hash"), _SURROGATE, "right_outer")
    return joined.select(*places, F.col(_KEY_GROUP), F.col(_SUBTASK), F.col(_STAMP))


def _barrier_stamp(subtask: Column, _: Column) -> Column:
    # The batch's logged time, and the first random number of this partition. Each plan has a seed
    # of its own, so all evaluations of a frame have the same number. Both are in one number, so
    # that rows of the stream do not become wider.
    time_ms = F.shiftleft(F.unix_millis(F.current_timestamp()), NONCE_BITS)
    nonce = F.floor(F.rand() * F.lit(1 << NONCE_BITS))
    return F.when(subtask < 0, time_ms + nonce)
