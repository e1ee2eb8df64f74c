"""From a streaming frame and a processor to a frame with state."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa
from pyspark import Broadcast
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from statebackend.errors import SettingError
from statebackend.keygroups import check_parallelism, default_max_parallelism
from statebackend.operators.declared_states import Declarations, parse_schema
from statebackend.operators.input.packing import PACKED_SCHEMA, RowPacker
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.operators.rows.row_conversion import arrow_schema
from statebackend.rpc.session_endpoint import Credentials
from statebackend.rpc.tls import driver_tls
from statebackend.runtime.driver.initial_state_frame import InitialState
from statebackend.runtime.driver.job import Job
from statebackend.runtime.driver.operator_specs import Operator, check_groups, key_schema_of
from statebackend.runtime.driver.worker_memory import worker_memory
from statebackend.runtime.time_plan import TimePlan
from statebackend.runtime.worker.shipped_constants import PackedProcessor, pack, sent_by
from statebackend.runtime.worker.shipped_processor import ShippedProcessor
from statebackend.runtime.worker.task_spec import NO_JOB, task_spec
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.schema.types import is_fixed_width
from statebackend.settings import Settings
from statebackend.spark.frames.anchor import Anchor, anchored
from statebackend.spark.frames.broadcast_input import with_rules
from statebackend.spark.frames.event_time import passing_on, time_plan, with_event_time
from statebackend.spark.frames.heartbeat import SOURCE_NAME, HeartbeatFile, beating
from statebackend.spark.frames.repeatable_sources import check_sources, source_names
from statebackend.spark.frames.static_frames import once_through, static_operator
from statebackend.spark.session_settings import default_parallelism, frame_limits
from statebackend.spark.start.writer_inspection import function_name
from statebackend.spark.worker.task import SubtaskTask
from statebackend.system import new_id, warn
from statebackend.threads import THREADS

__all__ = ["KEY_GROUPS", "Early", "FrameBuilder", "OperatorCall", "StatefulFrame"]

_log = logging.getLogger("statebackend.spark")
KEY_GROUPS: Final = 1024
"""The max parallelism of a job that names none and is not known when its frames are made."""
# So many rows of so many fields of fixed width are far from 64 MB, Spark's limit for a batch.
_NARROW_FIELDS: Final = 100


@dataclass(frozen=True)
class Early:
    """What is done before the shuffle, in ``mapInArrow``. ``schema``: of the rows that it gives."""

    run: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
    schema: StructType


@dataclass(frozen=True)
class OperatorCall:
    """An operator as a call asks for it: all but the rows that go in.

    Attributes:
        names: of the key columns. record: what a processor declares in a time mode.
        time: the arguments of :func:`_timed`, or the plan. rules: for every subtask.
        initial_names: of the initial state's key columns, where they are others.
        sides: of a connected operator.
        shown: how many of the input's first columns the processor sees; None: all.
        output_mode: in which the query must be started; "": in any.
        early: makes the operator's rows of those that go in.
        named_after: see `Operator`.
    """

    uid: str
    names: list[str]
    processor: Any
    record: Callable[[Any, str], Declarations]
    output_schema: StructType | str
    flavour: str
    time: dict[str, Any] | TimePlan
    initial_state: Any = None
    initial_names: list[str] | None = None
    sides: tuple[StructType, StructType] | None = None
    shown: int | None = None
    output_mode: str = ""
    rules: DataFrame | None = None
    early: Early | None = None
    named_after: str = ""


@dataclass(frozen=True)
class StatefulFrame:
    """What a start must know of a frame that was made here.

    Attributes:
        name: of its function, by which Spark's plan shows it.
        session: of the frame. anchor: where its subtasks are.
        heartbeat: what it brought along for batches without data; None: nothing.
    """

    name: str
    operator: Operator
    session: SparkSession
    anchor: Anchor
    heartbeat: HeartbeatFile | None


class FrameBuilder:
    """Makes the frames of one backend: their operators, anchors and heartbeats.

    A frame is fixed when it is made, by the settings alone. The job that it works for is found when
    its query starts.

    Args:
        job: where it is known before. A number of subtasks or key groups that is not set is then
            the job's own.
    """

    def __init__(self, spark: SparkSession, job: Job | None, settings: Settings) -> None:
        self._spark, self._job, self._settings = spark, job, settings
        self._frames: dict[str, StatefulFrame] = {}
        self._kept: list[ShippedProcessor] = []
        self._anchors: dict[int, Anchor] = {}
        self._credentials: Broadcast[Credentials] | None = None
        self._once = THREADS.lock()  # frames may be made in several threads
        self._resolved: tuple[int, int] | None = None

    def newest(
        self, wanted: Callable[[StatefulFrame], bool] = lambda frame: True
    ) -> list[StatefulFrame]:
        """Of the frames that are wanted those that were made last, one for each uid."""
        made = list(self._frames.values())  # others may be made meanwhile
        return list({one.operator.uid: one for one in made if wanted(one)}.values())

    def named(self, names: Iterable[str]) -> list[StatefulFrame]:
        """The frames whose functions have these names; of another backend's there are none."""
        return [self._frames[name] for name in names if name in self._frames]

    def build(self, df: DataFrame, call: OperatorCall) -> DataFrame:
        """The frame of an operator over the rows of ``df``.

        Raises:
            UsageError: (one of its kinds) what is wrong with the arguments or the processor.
            StorageError: the store cannot be reached or written.
        """
        uid, names, rules, early = call.uid, call.names, call.rules, call.early
        self._check_uid(uid)
        self._check_repeatable(df, rules)
        output = parse_schema(call.output_schema, f"the output of operator {uid!r}")
        arrow_schema(output)
        rows = early.schema if early else df.schema
        arrow_schema(rows)
        df, when = _timed(df, call.time, output, uid)
        initial = InitialState.given(call.initial_state, call.initial_names or names, rows, names)
        settings = self._settings
        packed = pack(call.processor, uid=uid, limit_bytes=settings.constant_bytes)
        declared = call.record(packed.rehearsal(), when.mode)
        if not df.isStreaming:
            operator = static_operator(uid, rows, names, declared, when, initial, settings)
            plan = self._plan(operator, rows, output, call)
            shipped = self._shipped(packed)
            return once_through(df, operator, plan, shipped, settings, settings.local_dir)
        operator = self._operator(uid, rows, names, declared=declared, when=when, initial=initial)
        self._anchor(operator.parallelism)  # it is filled beside what follows
        narrow, nodes = _narrow(df.schema, (rules or df).schema, rows), 2 if early else 1
        operator = replace(
            operator,
            narrow=narrow,
            nodes=nodes,
            output_mode=call.output_mode,
            named_after=call.named_after,
        )
        plan = self._plan(operator, rows, output, call)
        df = self._packed(df, early, plan, operator)
        df = self._with_rules(df, rules, names, operator)
        task = self._task(operator, plan, self._shipped(packed), packed=early is not None)
        by = None if early or rules is not None else names
        return self._mapped(df, by, task, operator, output)

    def _mapped(
        self,
        df: DataFrame,
        names: list[str] | None,
        task: SubtaskTask,
        operator: Operator,
        output: StructType,
    ) -> DataFrame:
        """The operator's output; a start finds it by its function's name."""
        when = operator.time
        beat = self._heartbeat_of(df, when)
        df = beating(df, beat) if beat else df
        anchor = self._anchor(operator.parallelism)
        routed = anchored(df, names, anchor, operator.max_parallelism)
        result = with_event_time(routed.mapInArrow(task, output), when, operator.uid)
        name, operator = task.__name__, replace(operator, frame=result)
        self._frames[name] = StatefulFrame(name, operator, df.sparkSession, anchor, beat)
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
        self, operator: Operator, rows: StructType, output: StructType, call: OperatorCall
    ) -> OperatorPlan:
        initial = operator.initial
        frame_rows, frame_bytes = frame_limits(self._spark)
        return OperatorPlan(
            uid=operator.uid,
            flavour=call.flavour,
            input_schema=rows,
            key_positions=tuple(rows.names.index(name) for name in call.names),
            output_schema=output,
            states=operator.states,
            time_mode=operator.time.mode,
            timezone=str(self._spark.conf.get("spark.sql.session.timeZone", "UTC")),
            frame_rows=frame_rows,
            frame_bytes=frame_bytes,
            initial_schema=initial.frame.schema if initial else None,
            initial_key_positions=initial.key_positions if initial else (),
            sides=call.sides,
            shown=call.shown,
            rules_schema=call.rules.schema if call.rules else None,
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

    def _task(
        self, operator: Operator, plan: OperatorPlan, processor: ShippedProcessor, *, packed: bool
    ) -> SubtaskTask:
        spec = task_spec(
            operator,
            plan,
            NO_JOB,
            self._settings,
            # A worker that ends with its task would take what is not flushed along.
            keep_stores=self._conf("spark.python.worker.reuse", "true") != "false",
            # Of two attempts one is killed with its worker, and with the delegated epoch in it.
            may_follow=self._conf("spark.speculation", "false") != "true",
            packed=packed,
            stays_open=False,
            memory=worker_memory(self._spark),
        )
        return SubtaskTask(spec, processor, self.credentials(), function_name(plan.uid, new_id()))

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

    def _heartbeat_of(self, df: DataFrame, when: TimePlan) -> HeartbeatFile | None:
        """What an operator with a time mode brings along, unless one before it has.

        So where it stands among Spark's sources follows from the query, and not from the order in
        which its frames were made: Spark's offsets go by place.
        """
        if when.mode == "none" or not self._settings.heartbeat or SOURCE_NAME in source_names(df):
            return None
        return HeartbeatFile()

    def _conf(self, key: str, default: str) -> str:
        return self._spark.sparkContext.getConf().get(key, default) or default

    def credentials(self) -> Broadcast[Credentials]:
        """The tasks' with the coordinator; by broadcast, so that no closure or log has them."""
        with self._once:
            if self._credentials is None:
                tls = driver_tls(self._settings)
                drawn = Credentials(
                    token=secrets.token_urlsafe(24), certificate=tls.certificate if tls else b""
                )
                self._credentials = self._spark.sparkContext.broadcast(drawn)
            return self._credentials

    def close(self) -> None:
        """Let go of the cached anchors."""
        while self._anchors:
            self._anchors.popitem()[1].release()

    def _anchor(self, parallelism: int) -> Anchor:
        with self._once:
            if not self._anchors:
                self._check_locality()
            if parallelism not in self._anchors:
                self._anchors[parallelism] = Anchor(self._spark, parallelism)
            return self._anchors[parallelism]

    def _check_uid(self, uid: str) -> None:
        if not isinstance(uid, str) or not uid:
            raise SettingError(
                f"An operator was given the uid {uid!r}.",
                todo="Give uid= a name that stays the same for the life of the job.",
            )

    def parallelism(self) -> tuple[int, int]:
        """Subtasks and key groups: given, else the job's, else by default."""
        if self._resolved is not None:
            return self._resolved
        known = None
        if self._job is not None:
            live = self._job.resolved.of(self._job.manifests())
            known = next(iter((live or self._job.begins()).values()), None)
        parallelism = self._settings.parallelism or (
            known.parallelism if known else default_parallelism(self._spark)
        )
        max_parallelism = self._settings.max_parallelism or (
            known.max_parallelism if known else self._default_max_parallelism(parallelism)
        )
        check_parallelism(parallelism, max_parallelism)
        if self._job is not None:
            if known is not None:
                check_groups(self._job.name, known.max_parallelism, max_parallelism)
            self._resolved = parallelism, max_parallelism  # a frame asks the log once
        return parallelism, max_parallelism

    def _default_max_parallelism(self, parallelism: int) -> int:
        if self._job is not None:
            return default_max_parallelism(parallelism)
        # Of a job that is not known yet: what it had before must come out again, whatever the
        # parallelism is by now.
        return KEY_GROUPS

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
                warn(message)
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
