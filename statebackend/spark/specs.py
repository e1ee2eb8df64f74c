"""What the query's operators are, against what the checkpoint says they were."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql.types import StructType

from snapshot.operators import OperatorSpec
from snapshot.record import Manifest
from snapshot.stateids import StateIds, assign_ids
from statebackend.errors import MissingUidError, SettingError, StateMismatchError
from statebackend.ops.declared import StateDeclaration
from statebackend.spark.initial import InitialState
from statebackend.spark.timeplan import NO_TIME, TimePlan

__all__ = ["Operator", "check_watermark", "operator_specs"]

_NOT_STORED = (
    *("nullable", "containsNull", "valueContainsNull", "metadata"),
    *("ttl_ms", "ttl_update", "ttl_expired"),
)
_KEY_STATE = ""  # the key's schema is kept beside the states', under a name no state can have


@dataclass(frozen=True)
class Operator:
    """An operator as the driver made it. ``deleted``: names given to deleteIfExists."""

    uid: str
    parallelism: int
    max_parallelism: int
    key_schema: StructType
    states: dict[str, StateDeclaration]
    deleted: tuple[str, ...] = ()
    time: TimePlan = NO_TIME
    initial: InitialState | None = None

    def schemas(self) -> dict[str, str]:
        """What the checkpoint keeps of its types."""
        kept = {name: d.to_json() for name, d in self.states.items()}
        return {_KEY_STATE: self.key_schema.json(), **kept}


def operator_specs(
    job: str,
    operators: Mapping[str, Operator],
    newest: Mapping[str, Manifest],
    *,
    allow_dropped_state: bool,
    heartbeat: bool,
) -> dict[str, OperatorSpec]:
    """What the coordinator is told of each operator.

    Args:
        newest: the last record of each operator that the checkpoint holds.
        heartbeat: operators with a time mode bring a source of their own along.

    Raises:
        MissingUidError: an operator of the checkpoint is not there any more.
        StateMismatchError: a state is not, or is another.
        SettingError: nothing makes a watermark.
    """
    gone = sorted(set(newest) - set(operators))
    if gone and not allow_dropped_state:
        raise MissingUidError(
            f"The checkpoint of job {job!r} holds state of operator(s) "
            f"{', '.join(map(repr, gone))}, which the query does not have.",
            todo="Give the operator the uid it had, or pass allow_dropped_state=True to drop "
            "its state.",
        )
    specs = {}
    for uid, operator in operators.items():
        _check_time_mode(operator, newest.get(uid), heartbeat)
        ids = _state_ids(operator, newest.get(uid), allow_dropped_state)
        specs[uid] = OperatorSpec(
            uid=uid,
            parallelism=operator.parallelism,
            max_parallelism=operator.max_parallelism,
            states=ids.states,
            dropped=ids.dropped,
            schemas=operator.schemas(),
            time_mode=operator.time.mode,
            watermark_delay_ms=operator.time.delay_ms,
            two_inputs=operator.time.side_position is not None,
        )
    check_watermark(job, operators)
    return specs


def _check_time_mode(operator: Operator, known: Manifest | None, heartbeat: bool) -> None:
    before = known.time_mode if known else ""
    if before in ("", operator.time.mode) or (before == "none" and not heartbeat):
        return
    if before == "none":
        raise StateMismatchError(
            f"Operator {operator.uid!r} was started with time_mode={operator.time.mode!r}, but the "
            f"checkpoint has it without one; its heartbeat would be one more source, which Spark "
            f"refuses in a checkpoint location that is in use.",
            todo="Set heartbeat=0 (timers then wait for the next batch with data), or start the "
            "job anew.",
        )
    raise StateMismatchError(
        f"Operator {operator.uid!r} was started with time_mode={operator.time.mode!r}, but the "
        f"checkpoint has timers in mode {before!r}.",
        todo=f"Give time_mode={before!r}, or the operator another uid.",
    )


def check_watermark(job: str, operators: Mapping[str, Operator]) -> None:
    """Refuse event time without anything that makes a watermark.

    Raises:
        SettingError: naming the operators.
    """
    times = {uid: operator.time for uid, operator in operators.items()}
    timed = [uid for uid, time in times.items() if time.mode == "event"]
    if timed and all(times[uid].delay_ms is None for uid in timed):
        raise SettingError(
            f"Operators {', '.join(map(repr, timed))} run on event time, but no operator of job "
            f"{job!r} makes a watermark.",
            todo="Give event_time= and watermark_delay= to the first of them (or call "
            "withWatermark() on its frame).",
        )


def _state_ids(operator: Operator, known: Manifest | None, allow_dropped_state: bool) -> StateIds:
    if known is not None:
        declared = operator.schemas()
        for name, schema in known.schemas.items():
            if name in operator.deleted:
                continue
            if name in declared and _shape(declared[name]) == _shape(schema):
                continue
            if name not in declared and allow_dropped_state:
                continue
            what = "the key" if name == _KEY_STATE else f"state {name!r}"
            raise StateMismatchError(
                f"Operator {operator.uid!r} was started with {what} as "
                f"{declared.get(name, 'nothing')}, but the checkpoint has it as {schema}.",
                todo="Declare it as it was (a new state may be added under a new name), call "
                "deleteIfExists() in init(), or pass allow_dropped_state=True where a state "
                "is gone for good.",
            )
    return assign_ids(
        operator.uid,
        known.states if known else {},
        declared=list(operator.states),
        deleted=operator.deleted,
    )


def _shape(schema: str) -> Any:
    """A schema as far as stored bytes depend on it: without nullability and metadata."""

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: bare(v) for k, v in value.items() if k not in _NOT_STORED}
        if isinstance(value, list):
            return [bare(v) for v in value]
        if isinstance(value, str) and value.startswith("{"):
            try:
                return bare(json.loads(value))
            except ValueError:  # a name
                return value
        return value

    return bare(json.loads(schema))
