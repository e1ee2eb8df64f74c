"""Reads the rows of states that Spark's own operators keep, by Spark's source `statestore`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from statebackend.operators.pandas_frames.group_state import NO_TIME_MS, STATE, TIMEOUT
from statebackend.spark.from_spark.reached_location import ReachedLocation
from statebackend.spark.from_spark.spark_checkpoint import SparkCheckpoint
from statebackend.spark.from_spark.spark_operators import TIMERS, SparkOperator, SparkState, unread

__all__ = ["StateReader"]

_LAST_MS: Final = 2**63 - 2
_FORMAT: Final = "spark.sql.streaming.stateStore.checkpointFormatVersion"
_EXPIRY: Final = "ttlExpirationMs"


@dataclass(frozen=True)
class StateReader:
    """Reads states after one batch, as tables that `write_savepoint` takes."""

    spark: SparkSession
    place: ReachedLocation
    epoch: int

    @classmethod
    def of(cls, found: SparkCheckpoint) -> StateReader:
        """Of a checkpoint, in a session of its own: the source goes by settings of the session."""
        session = found.spark.newSession()
        session.conf.set(_FORMAT, str(found.format))
        session.conf.set("spark.sql.session.timeZone", "UTC")
        return cls(session, found.place, found.epoch)

    def rows(self, operator: SparkOperator) -> tuple[dict[str, DataFrame], DataFrame | None]:
        """The rows of an operator's states by name, and its timers; nothing is read yet.

        Raises:
            NotRestorableError: Spark does not read them.
        """
        if operator.function:
            return self._of_function(operator)
        found, timers = {}, None
        for state in operator.states:
            if state.kind == TIMERS:
                timers = self._timers(operator)
            else:
                found[state.name] = self._of_state(operator, state)
        return found, timers

    def _load(self, operator: SparkOperator, **options: str) -> DataFrame:
        reader = self.spark.read.format("statestore")
        reader.options(batchId=str(self.epoch), operatorId=str(operator.number), **options)
        try:
            return reader.load(self.place.path)
        except (PySparkException, Py4JJavaError) as error:
            what = f"the state of operator {operator.number} ({operator.name})"
            raise unread(self.place.shown, what, error) from error

    def _of_state(self, operator: SparkOperator, state: SparkState) -> DataFrame:
        rows = self._load(operator, stateVarName=state.name, flattenCollectionTypes="true")
        value = {"value": "value", "list": "list_element", "map": "user_map_value"}[state.kind]
        columns = [F.col("key")]
        if state.kind == "map":
            columns.append(F.col("user_map_key").alias("map_key"))
        if state.kind == "list":
            columns.append(F.lit(0).alias("index"))  # their order counts
        if not state.ttl:
            return rows.select(*columns, F.col(value).alias("value"))
        return rows.select(
            *columns,
            F.col(f"{value}.value").alias("value"),
            F.col(f"{value}.{_EXPIRY}").alias("expires_at_ms"),
        )

    def _timers(self, operator: SparkOperator) -> DataFrame:
        rows = self._load(operator, readRegisteredTimers="true")
        return rows.select("key", F.col("expiration_timestamp_ms").alias("at_ms"))

    def _of_function(
        self, operator: SparkOperator
    ) -> tuple[dict[str, DataFrame], DataFrame | None]:
        rows = self._load(operator)
        value: Any = rows.schema["value"].dataType
        found = {
            STATE: rows.where("value.groupState is not null").select(
                "key", F.col("value.groupState").alias("value")
            )
        }
        if "timeoutTimestamp" not in value.names:
            return found, None
        at = F.col("value.timeoutTimestamp").cast("long")
        timed = rows.where(at != NO_TIME_MS)
        found[TIMEOUT] = timed.select("key", F.struct(at.alias("at_ms")).alias("value"))
        # Spark's keys time out after that time, not at it; see `group_state.timer_ms`.
        due = F.least(at, F.lit(_LAST_MS)) + 1
        return found, timed.select("key", due.alias("at_ms"))
