"""The stateful operators of a checkpoint location of Spark's, and what of them comes over.

They are read by Spark itself, by its source `state-metadata`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.state import GroupStateTimeout
from pyspark.sql.types import StructType

from statebackend.errors import NotRestorableError
from statebackend.operators.pandas_frames.group_state import STATE
from statebackend.spark.from_spark.reached_location import ReachedLocation

__all__ = [
    "TIMERS",
    "SparkOperator",
    "SparkState",
    "spark_operators",
    "time_mode_of",
    "unread",
]

TIMERS: Final = "timers"
_PROCESSORS: Final = ("transformWithStateInPandasExec", "transformWithStateInPySparkExec")
_FUNCTIONS: Final = ("applyInPandasWithState",)
_TIME_MODES: Final = {
    "notime": "none",
    "none": "none",
    "processingtime": "processing",
    "eventtime": "event",
}
_KINDS: Final = {"ValueState": "value", "ListState": "list", "MapState": "map"}
_TIMER_KIND: Final = "TimerState"
_STATELESS: Final = "it keeps no state and no timers, so there is nothing to bring over"


@dataclass(frozen=True)
class SparkState:
    """A state of an operator, or its timers.

    Attributes:
        name: as the processor has it. kind: value, list, map or timers. ttl: its entries expire.
        problem: why it does not come over; empty if it does.
    """

    name: str
    kind: str
    ttl: bool = False
    problem: str = ""


@dataclass(frozen=True)
class SparkOperator:
    """An operator.

    Attributes:
        number: Spark's `operatorId`. name: as Spark says it.
        function: it is that of ``applyInPandasWithState``. time_mode: None: Spark does not say it.
        states: none of an operator that begins anew, as it did in Spark at each start.
        problem: why it does not come over; empty if it does.
    """

    number: int
    name: str
    function: bool
    states: tuple[SparkState, ...]
    time_mode: str | None
    problem: str = ""

    def key(self, states: Mapping[str, DataFrame], timers: DataFrame | None) -> StructType:
        """The schema of its key, by the rows of its states or timers."""
        rows = [*states.values(), *([] if timers is None else [timers])]
        found: Any = rows[0].schema["key"].dataType
        return StructType(list(found))


def spark_operators(spark: SparkSession, place: ReachedLocation) -> list[SparkOperator]:
    """The operators of a location, in Spark's order.

    Raises:
        NotRestorableError: Spark does not read them.
    """
    try:
        rows = spark.read.format("state-metadata").load(place.path).collect()
    except (PySparkException, Py4JJavaError) as error:
        raise unread(place.shown, "what its operators are", error) from error
    found: dict[int, SparkOperator] = {}
    for row in rows:  # a row for each store: a join has four
        if row.operatorId not in found:
            found[row.operatorId] = _operator(row)
    operators = [found[number] for number in sorted(found)]
    if not any(one.states or one.problem for one in operators):
        return [replace(one, problem=_STATELESS) for one in operators]
    return operators


def unread(path: str, what: str, error: Exception) -> NotRestorableError:
    """For what Spark says when it does not read a checkpoint."""
    said = error.java_exception.toString() if isinstance(error, Py4JJavaError) else error
    first = "".join(c if c.isprintable() else "?" for c in str(said).strip().partition("\n")[0])
    return NotRestorableError(
        f"Spark does not read {what} in the checkpoint location {path} ({first[:300]}).",
        todo="Check that the location is whole, and that this Spark is at least as new as the one "
        "that wrote it.",
    )


def _operator(row: Any) -> SparkOperator:
    number, name = int(row.operatorId), str(row.operatorName)
    states: tuple[SparkState, ...]
    if name in _FUNCTIONS:
        states = (SparkState(STATE, "value"), SparkState(TIMERS, TIMERS))
        return SparkOperator(number, name, True, states, None)
    if name not in _PROCESSORS:
        problem = (
            "the import reads transformWithState and applyInPandasWithState of PySpark, and this "
            "is another operator"
        )
        return SparkOperator(number, name, False, (), None, problem)
    said = json.loads(row.operatorProperties)
    variables = said.get("stateVariables", [])
    states = tuple(
        sorted(
            (_state(one) for one in variables if not one["stateName"].startswith("$")),
            key=lambda one: one.name,
        )
    )
    if any(one["stateVariableType"] == _TIMER_KIND for one in variables):
        states += (SparkState(TIMERS, TIMERS),)
    mode = _TIME_MODES.get(str(said.get("timeMode", "")).lower())
    problem = "" if mode else f"its time mode is {said.get('timeMode')!r}, which is not known here"
    return SparkOperator(number, name, False, states, mode, problem)


def _state(variable: Mapping[str, Any]) -> SparkState:
    name, kind = str(variable["stateName"]), _KINDS.get(str(variable["stateVariableType"]))
    if kind is None:
        shown = variable["stateVariableType"]
        return SparkState(name, str(shown), problem=f"a {shown} is not known here")
    return SparkState(name, kind, bool(variable.get("ttlEnabled")))


def time_mode_of(timeout: str) -> str | None:
    """The time mode of a function with a timeout of Spark's name; None: it is no such name."""
    return {
        GroupStateTimeout.NoTimeout: "none",
        GroupStateTimeout.ProcessingTimeTimeout: "processing",
        GroupStateTimeout.EventTimeTimeout: "event",
    }.get(timeout)
