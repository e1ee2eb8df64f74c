"""From a streaming frame and a processor to a frame with state."""

from __future__ import annotations

import logging
import secrets
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa
from pyspark import Broadcast
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from statebackend.errors import DuplicateUidError, SettingError
from statebackend.keygroups import check_parallelism, default_max_parallelism
from statebackend.operators.declared_states import Declarations, parse_schema
from statebackend.operators.input.packing import PACKED_SCHEMA, RowPacker
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.operators.rows.rowconv import arrow_schema
from statebackend.rpc.service import Credentials
from statebackend.rpc.tls import driver_tls
from statebackend.runtime.driver.initial_frame import InitialState
from statebackend.runtime.driver.inputs import key_schema_of
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.operator_specs import Operator
from statebackend.runtime.driver.worker_memory import worker_memory
from statebackend.runtime.operator_time import TimePlan, passing_on, time_plan, with_event_time
from statebackend.runtime.worker.shipped_constants import PackedProcessor, pack, sent_by
from statebackend.runtime.worker.shipped_processor import ShippedProcessor
from statebackend.runtime.worker.task_spec import TaskSpec, task_spec
from statebackend.schema.keys import KeyCodec
from statebackend.schema.types import is_fixed_width
from statebackend.settings import Settings
from statebackend.spark.frames.anchor import Anchor, anchored
from statebackend.spark.frames.broadcast_input import with_rules
from statebackend.spark.frames.heartbeat import SOURCE_NAME, HeartbeatFile, beating
from statebackend.spark.frames.rebalancing import SparkPlaces
from statebackend.spark.frames.replayable import check_sources, source_names
from statebackend.spark.frames.static_frames import once_through, static_operator
from statebackend.spark.session_settings import frame_limits
from statebackend.spark.worker.task import SubtaskTask

__all__ = ["Early", "FrameBuilder"]

_log = logging.getLogger("statebackend.spark")
# So many rows of so many fields of fixed width are far from 64 MB, Spark's limit for a batch.
_NARROW_FIELDS: Final = 100


@dataclass(frozen=True)
class Early:
    """What is done before the shuffle, in ``mapInArrow``. ``schema``: of the rows that it gives."""

    run: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
    schema: StructType


class FrameBuilder:
    """Makes the frames of one backend: its operators, their anchor, their heartbeat."""

    def __init__(self, spark: SparkSession, job: Job, settings: Settings, local_dir: str) -> None:
        self._spark, self._job, self._settings = spark, job, settings
        self.local_dir = local_dir
        self.operators: dict[str, Operator] = {}
        self.sessions = [spark]
        self.heartbeat: HeartbeatFile | None = None
        self._kept: list[ShippedProcessor] = []
        self._anchor: Anchor | None = None
        self._credentials: Broadcast[Credentials] | None = None
        self._resolved: tuple[int, int] | None = None

    def build(
        self,
        df: DataFrame,
        *,
        names: list[str],
        processor: Any,
        record: Callable[[Any, str], Declarations],
        output_schema: StructType | str,
        uid: str,
        flavour: str,
        time: dict[str, Any] | TimePlan,
        initial_state: Any = None,
        initial_names: list[str] | None = None,
        sides: tuple[StructType, StructType] | None = None,
        early: Early | None = None,
        rules: DataFrame | None = None,
    ) -> DataFrame:
        """The frame of an operator.

        Args:
            names: of the key columns. record: what a processor declares in a time mode.
            early: makes the operator's rows of those of ``df``. sides: of a connected operator.
            time: the arguments of :func:`_timed`, or the plan. rules: for every subtask.
            initial_names: of the initial state's key columns, where they are others.

        Raises:
            UsageError: (one of its kinds) what is wrong with the arguments or the processor.
            StorageError: the store cannot be reached or written.
        """
        self._check_uid(uid)
        self._check_repeatable(df, rules)
        output = parse_schema(output_schema, f"the output of operator {uid!r}")
        arrow_schema(output)
        rows = early.schema if early else df.schema
        arrow_schema(rows)
        df, when = _timed(df, time, output, uid)
        initial = InitialState.given(initial_state, initial_names or names, rows, names)
        settings = self._settings
        packed = pack(processor, uid=uid, limit_bytes=settings.constant_bytes)
        declared = record(packed.rehearsal(), when.mode)
        if not df.isStreaming:
            operator = static_operator(uid, rows, names, declared, when, initial, settings)
            plan = self._plan(operator, rows, names, output=output, flavour=flavour, sides=sides)
            return once_through(df, operator, plan, self._shipped(packed), settings, self.local_dir)
        operator = self._operator(uid, rows, names, declared=declared, when=when, initial=initial)
        narrow, nodes = _narrow(df.schema, (rules or df).schema, rows), 2 if early else 1
        operator = replace(operator, narrow=narrow, nodes=nodes)
        plan = self._plan(operator, rows, names, output=output, flavour=flavour, sides=sides)
        plan = replace(plan, rules_schema=rules.schema if rules else None)
        spec = self._spec(operator, plan, packed=early is not None)
        task = SubtaskTask(spec, self._shipped(packed), self.credentials())
        df = self._packed(df, early, plan, operator)
        df = self._with_rules(df, rules, names, operator)
        beat = self._heartbeat_of(df, when)
        df = beating(df, beat) if beat else df
        routed = self._anchored(df, None if early or rules is not None else names, operator)
        result = with_event_time(routed.mapInArrow(task, output), when, uid)
        self.operators[uid] = replace(operator, frame=result)
        self.heartbeat = self.heartbeat or beat
        return result

    def _check_repeatable(self, *frames: DataFrame | None) -> None:
        """Refuse sources that cannot repeat a batch, where that may be asked of them."""
        if self._settings.commit != "async":
            return
        vouched = [name.strip() for name in self._settings.repeatable_sources.split(",")]
        for frame in frames:
            if frame is not None and frame.isStreaming:
                check_sources(frame, vouched)

    def _with_rules(
        self, df: DataFrame, rules: DataFrame | None, names: list[str], operator: Operator
    ) -> DataFrame:
        if rules is None:
            return df
        parallelism, max_parallelism = operator.parallelism, operator.max_parallelism
        arrow_schema(rules.schema)
        return with_rules(
            df, rules, keys=names, parallelism=parallelism, max_parallelism=max_parallelism
        )

    def _plan(
        self,
        operator: Operator,
        rows: StructType,
        names: list[str],
        *,
        output: StructType,
        flavour: str,
        sides: tuple[StructType, StructType] | None,
    ) -> OperatorPlan:
        initial = operator.initial
        frame_rows, frame_bytes = frame_limits(self._spark)
        return OperatorPlan(
            uid=operator.uid,
            flavour=flavour,
            input_schema=rows,
            key_positions=tuple(rows.names.index(name) for name in names),
            output_schema=output,
            states=operator.states,
            time_mode=operator.time.mode,
            timezone=str(self._spark.conf.get("spark.sql.session.timeZone", "UTC")),
            frame_rows=frame_rows,
            frame_bytes=frame_bytes,
            initial_schema=initial.frame.schema if initial else None,
            initial_key_positions=initial.key_positions if initial else (),
            sides=sides,
            withdrawn=operator.withdrawn,
        )

    def _packed(
        self, df: DataFrame, early: Early | None, plan: OperatorPlan, operator: Operator
    ) -> DataFrame:
        if early is None:
            return df
        places = operator.parallelism, operator.max_parallelism
        packer = RowPacker(early.run, early.schema, plan.key_positions, *places)
        return df.mapInArrow(packer, PACKED_SCHEMA)

    def _spec(self, operator: Operator, plan: OperatorPlan, *, packed: bool) -> TaskSpec:
        return task_spec(
            operator,
            plan,
            self._job,
            self._settings,
            local_dir=self.local_dir,
            # A worker that ends with its task would take what is not flushed along.
            keep_stores=self._conf("spark.python.worker.reuse", "true") != "false",
            # Of two attempts one is killed with its worker, and with the delegated epoch in it.
            may_follow=self._conf("spark.speculation", "false") != "true",
            packed=packed,
            stays_open=False,
            memory=worker_memory(self._spark),
        )

    def _operator(
        self,
        uid: str,
        rows: StructType,
        names: list[str],
        *,
        declared: Declarations,
        when: TimePlan,
        initial: InitialState | None,
    ) -> Operator:
        key_schema = key_schema_of(rows, names)
        KeyCodec(key_schema)
        parallelism, max_parallelism = self.parallelism()
        return Operator(
            uid=uid,
            parallelism=parallelism,
            max_parallelism=max_parallelism,
            key_schema=key_schema,
            states=declared.declared,
            deleted=tuple(declared.dropped),
            withdrawn=frozenset(declared.withdrawn),
            time=when,
            initial=initial,
        )

    def _shipped(self, packed: PackedProcessor) -> ShippedProcessor:
        context = self._spark.sparkContext
        shipped = packed.ship(context.broadcast, sent_by(context))
        self._kept.append(shipped)  # what was sent is found again as long as it is kept
        return shipped

    def _anchored(self, df: DataFrame, names: list[str] | None, operator: Operator) -> DataFrame:
        if all(df.sparkSession is not session for session in self.sessions):
            self.sessions.append(df.sparkSession)
        anchor = self._anchored_at(operator.parallelism)
        return anchored(df, names, anchor, operator.max_parallelism)

    def _heartbeat_of(self, df: DataFrame, when: TimePlan) -> HeartbeatFile | None:
        """What an operator with a time mode brings along, unless one before it has.

        So where it stands among Spark's sources follows from the query, and not from the order in
        which its frames were made: Spark's offsets go by place.
        """
        if when.mode == "none" or not self._settings.heartbeat or SOURCE_NAME in source_names(df):
            return None
        return self.heartbeat or HeartbeatFile()

    def _conf(self, key: str, default: str) -> str:
        return self._spark.sparkContext.getConf().get(key, default) or default

    def credentials(self) -> Broadcast[Credentials]:
        """The tasks' with the coordinator; by broadcast, so that no closure or log has them."""
        if self._credentials is None:
            tls = driver_tls(self._settings)
            drawn = Credentials(
                token=secrets.token_urlsafe(24), certificate=tls.certificate if tls else b""
            )
            self._credentials = self._spark.sparkContext.broadcast(drawn)
        return self._credentials

    def places(self) -> SparkPlaces | None:
        """Where subtasks are; None before the first frame."""
        return SparkPlaces(self._spark, self._anchor) if self._anchor is not None else None

    def close(self) -> None:
        """Let go of the cached anchor."""
        if self._anchor is not None:
            self._anchor.release()
            self._anchor = None

    def _anchored_at(self, parallelism: int) -> Anchor:
        if self._anchor is None:
            self._check_locality()
            self._anchor = Anchor(self._spark, parallelism)
        return self._anchor

    def _check_uid(self, uid: str) -> None:
        if not isinstance(uid, str) or not uid:
            raise SettingError(
                f"An operator was given the uid {uid!r}.",
                todo="Give uid= a name that stays the same for the life of the job.",
            )
        if uid in self.operators:
            raise DuplicateUidError(
                f"Job {self._job.name!r} has an operator {uid!r} already.",
                todo="Give each operator a uid of its own; to build a query anew, make a new "
                "StateBackend.",
            )

    def parallelism(self) -> tuple[int, int]:
        """Subtasks and key groups, the same for every operator: given, the job's, or defaults."""
        if self._resolved is not None:
            return self._resolved
        lineages = self._job.lineages() or self._job.begins()
        known = next(iter(lineages.values()), None)
        parallelism = self._settings.parallelism or (
            known.parallelism
            if known
            else int(self._spark.conf.get("spark.sql.shuffle.partitions", "200") or 200)
        )
        max_parallelism = self._settings.max_parallelism or (
            known.max_parallelism if known else default_max_parallelism(parallelism)
        )
        check_parallelism(parallelism, max_parallelism)
        if known is not None:
            self._job.check_parallelism(known, max_parallelism)
        self._resolved = parallelism, max_parallelism
        return self._resolved

    def _check_locality(self) -> None:
        conf = self._spark.sparkContext.getConf()
        if conf.get("spark.speculation", "false") == "true":
            _log.warning(
                "spark.speculation is on: Spark keeps the output of the first twin to finish, and "
                "the state may be the other's. With processors that give the same for the same "
                "input this makes no difference."
            )
        if conf.get("spark.shuffle.reduceLocality.enabled", "true") != "false":
            message = (
                "spark.shuffle.reduceLocality.enabled is not false: subtasks may move between "
                "executors, and local copies be used less. Set it when the session is built."
            )
            if not (conf.get("spark.master") or "").startswith("local["):
                warnings.warn(message, stacklevel=5)
            _log.info(message)


def _timed(
    df: DataFrame, time: dict[str, Any] | TimePlan, output: StructType, uid: str
) -> tuple[DataFrame, TimePlan]:
    """An operator's input and times, by the arguments of :func:`time_plan`.

    If ``goes_on`` among them names a column of the output: as :func:`passing_on` gives them.
    """
    if isinstance(time, TimePlan):
        return df, time
    given = dict(time)
    column = given.pop("goes_on", "")
    when = time_plan(df, **given)
    if not column or not df.isStreaming:
        return df, when
    return passing_on(df, output, column, when, uid)


def _narrow(*schemas: StructType) -> bool:
    fields = [field for schema in schemas for field in schema]
    fixed = all(is_fixed_width(field.dataType) for field in fields)
    return fixed and len(fields) <= _NARROW_FIELDS
