"""What the query's operators are, against what the checkpoint says they were."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from snapshot.formats.record import Manifest
from snapshot.formats.state_ids import StateIds, assign_ids
from snapshot.protocol.operators import OperatorSpec
from statebackend.errors import (
    MaxParallelismChangedError,
    MissingUidError,
    SettingError,
    StateMismatchError,
)
from statebackend.operators.declared_states import StateDeclaration
from statebackend.operators.redeclared_states import redeclared, versions_of
from statebackend.runtime.driver.initial_state_frame import InitialState
from statebackend.runtime.time_plan import NO_TIME, TimePlan
from statebackend.schema.keys.key_schemas import check_operator_key
from statebackend.schema.types import schema_from_json

__all__ = [
    "Operator",
    "check_groups",
    "check_watermark",
    "key_schema_of",
    "log_changes",
    "operator_specs",
]

_log = logging.getLogger("statebackend.spark")
_KEY_STATE = ""  # the key's schema is kept beside the states', under a name no state can have


@dataclass(frozen=True)
class Operator:
    """An operator as the driver made it.

    ``deleted``: names given to deleteIfExists; ``withdrawn``: those that were asked for before.
    ``narrow``: Spark's batches of its rows are small by their number of rows alone. ``nodes``: how
    many of the plan's nodes that run Python are its own. ``frame``: its output, which a query is
    made of. ``output_mode``: "append" or "update", of a function of ``applyInPandasWithState``; ""
    otherwise. ``named_after``: whose name its uid is, a "class", a "function" or a "method"; "": it
    was given.
    """

    uid: str
    parallelism: int
    max_parallelism: int
    key_schema: StructType
    states: dict[str, StateDeclaration]
    deleted: tuple[str, ...] = ()
    time: TimePlan = NO_TIME
    initial: InitialState | None = None
    narrow: bool = False
    nodes: int = 1
    frame: DataFrame | None = None
    withdrawn: frozenset[str] = frozenset()
    output_mode: str = ""
    named_after: str = ""


def key_schema_of(rows: StructType, names: list[str]) -> StructType:
    """The schema of an operator's key."""
    return StructType([rows[name] for name in names])


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
        MaxParallelismChangedError: it is there, and its keys lie by another number of groups.
        StateMismatchError: a state is not, or is another.
        SettingError: nothing makes a watermark.
    """
    gone = sorted(set(newest) - set(operators))
    if gone and not allow_dropped_state:
        raise _missing(job, gone, sorted(set(operators) - set(newest)))
    _check_keyed(job, operators, newest)
    specs = {}
    for uid, operator in operators.items():
        _check_time_mode(operator, newest.get(uid), heartbeat)
        states = _states(operator, newest.get(uid), allow_dropped_state)
        ids = _state_ids(operator, newest.get(uid))
        specs[uid] = OperatorSpec(
            uid=uid,
            parallelism=operator.parallelism,
            max_parallelism=operator.max_parallelism,
            states=ids.states,
            dropped=ids.dropped,
            schemas={
                _KEY_STATE: operator.key_schema.json(),
                **{name: declared.to_json() for name, declared in states.items()},
            },
            versions=versions_of(states),
            time_mode=operator.time.mode,
            watermark_delay_ms=operator.time.delay_ms,
            two_inputs=operator.time.side_position is not None,
        )
    check_watermark(job, operators)
    return specs


def _check_keyed(
    job: str, operators: Mapping[str, Operator], newest: Mapping[str, Manifest]
) -> None:
    """As `check_groups`, for every operator that goes on; those without a key have no groups."""
    known = {
        uid: newest[uid].max_parallelism
        for uid, operator in operators.items()
        if uid in newest and operator.key_schema.fields
    }
    if len(set(known.values())) > 1:
        listed = ", ".join(f"{uid!r}: {number}" for uid, number in sorted(known.items()))
        raise MaxParallelismChangedError(
            f"The operators of job {job!r} differ in max_parallelism ({listed}); a query has one.",
            todo="Begin with a savepoint that has one for all: edit_savepoint(savepoint, to, "
            "max_parallelism=...) writes it.",
        )
    for uid, number in known.items():
        check_groups(job, number, operators[uid].max_parallelism)


def check_groups(job: str, known: int, asked: int) -> None:
    """Refuse another number of key groups than the checkpoint has: keys would not find their state.

    Raises:
        MaxParallelismChangedError: naming both.
    """
    if known != asked:
        raise MaxParallelismChangedError(
            f"Job {job!r} has max_parallelism {known}, but {asked} was asked for; it is fixed for "
            f"the job's life.",
            todo=f"Give max_parallelism={known} (or set spark.statebackend.maxParallelism={known}) "
            f"before the query's frames are made.",
        )


def _missing(job: str, gone: list[str], new: list[str]) -> MissingUidError:
    """The error for operators that are gone, which the new ones may be under other names."""
    what = (
        f"The checkpoint of job {job!r} holds state of operator(s) {', '.join(map(repr, gone))}, "
        f"which the query does not have"
    )
    if not new:
        return MissingUidError(
            f"{what}.",
            todo="Give the operator the uid it had, or pass allow_dropped_state=True to drop its "
            "state.",
        )
    was, now = gone[0], new[0]
    return MissingUidError(
        f"{what}; it has {', '.join(map(repr, new))}, which the checkpoint does not hold.",
        todo=f"If {now!r} is {was!r} under another name (by default an operator is named after its "
        f"class or function): give that its old name, or pass uid={was!r} to the backend's "
        f"method (docs/howto/drop-in.md), or rename the operator in a savepoint: "
        f"edit_savepoint(..., rename_operators={{{was!r}: {now!r}}}). If it is another operator, "
        f"pass allow_dropped_state=True to drop the old state.",
    )


def log_changes(
    specs: Mapping[str, OperatorSpec],
    newest: Mapping[str, Manifest],
    operators: Mapping[str, Operator],
) -> None:
    """Say which operators got their uid by default, which are rescaled, which states are changed.

    A number of subtasks that nobody set follows the cluster; a field that is renamed by mistake is
    dropped.

    Args:
        newest, operators: as for :func:`operator_specs`.
    """
    for uid, spec in specs.items():
        if uid not in newest and (kind := operators[uid].named_after):
            _log.info(
                "the uid of an operator is %r, the name of its %s; its state is found by it: keep "
                "that name, or give uid=%r",
                uid,
                kind,
                uid,
            )
        known = newest[uid].schemas if uid in newest else {}
        if uid in newest and newest[uid].parallelism != spec.parallelism:
            _log.warning(
                "operator %r is rescaled from %d to %d subtasks",
                uid,
                newest[uid].parallelism,
                spec.parallelism,
            )
        for name, versions in spec.versions.items():
            if name in known and len(StateDeclaration.from_json(known[name]).versions) < len(
                versions
            ):
                was, now = (schema_from_json(one).simpleString() for one in versions[-2:])
                _log.warning("state %r of operator %r was %s, is %s now", name, uid, was, now)


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


def _states(
    operator: Operator, known: Manifest | None, allow_dropped_state: bool
) -> dict[str, StateDeclaration]:
    """The operator's states as they go on from what the checkpoint has of them."""
    states = dict(operator.states)
    for name, schema in (known.schemas if known else {}).items():
        if name == _KEY_STATE:
            check_operator_key(operator.uid, schema, operator.key_schema.json())
        elif name in operator.deleted:
            continue
        elif name in states:
            before = StateDeclaration.from_json(schema)
            states[name] = redeclared(operator.uid, before, operator.states[name])
        elif not allow_dropped_state:
            raise StateMismatchError(
                f"The checkpoint holds state {name!r} of operator {operator.uid!r}, which the "
                f"processor does not declare any more.",
                todo="Declare it as it was, call deleteIfExists() in init(), or pass "
                "allow_dropped_state=True where it is gone for good.",
            )
    return states


def _state_ids(operator: Operator, known: Manifest | None) -> StateIds:
    return assign_ids(
        operator.uid,
        known.states if known else {},
        declared=list(operator.states),
        deleted=operator.deleted,
    )
