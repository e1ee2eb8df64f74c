"""Building a continuous job: ``backend.continuous(source, name=...).key_by(...).process(...)``.

Every call checks what it is given, so that a mistake is refused where it is made. Nothing runs, and
nothing is written, before `ContinuousStream.start`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from recovery.decide.restart_strategy import Strategy
from snapshot.barriers.alignment import Mode
from statebackend.api.arrow import ArrowProcessor
from statebackend.api.processors import BroadcastProcessor, CoProcessor, KeyedProcessor
from statebackend.continuous.driver.continuous_query import ContinuousQuery
from statebackend.continuous.driver.query_start import start
from statebackend.continuous.job.flow import Flow, Operation, check_event
from statebackend.continuous.job.graph import Edge, KeyedVertex, SinkNode, SourceVertex
from statebackend.continuous.job.job_options import INTERVAL, RESTART, RunOptions
from statebackend.continuous.job.processor_kinds import flavour_of, recorder
from statebackend.continuous.sinks.sink import Sink
from statebackend.continuous.sources.source import Source
from statebackend.continuous.worker.two_inputs import united
from statebackend.errors import SchemaError, SettingError
from statebackend.operators.declared_states import parse_schema
from statebackend.operators.operator_plan import OperatorPlan
from statebackend.operators.rows.row_conversion import arrow_schema
from statebackend.runtime.time_plan import time_mode_of
from statebackend.runtime.worker.shipped_constants import pack
from statebackend.schema.keys.key_codec import KeyCodec
from statebackend.schema.types import check_value_schema
from statebackend.spark_forms import Duration

__all__ = [
    "BroadcastConnected",
    "ConnectedStreams",
    "ContinuousStream",
    "KeyedStream",
    "continuous",
]


def continuous(flow: Flow, source: Source, *, name: str) -> ContinuousStream:
    """The rows of a source, in a continuous job; see `StateBackend.continuous`."""
    flow.check_new(name, "A source")
    if not isinstance(source, Source):
        raise SettingError(
            f"The source is a {type(source).__name__}.",
            todo="Give a statebackend Source, such as FileSource.",
        )
    flow.sources[name] = SourceVertex(name, source)
    if source.event_time is not None:
        flow.timed.add(name)
    return ContinuousStream(flow, name, source.schema)


@dataclass(frozen=True)
class ContinuousStream:
    """A stream of rows in a continuous job: a source's, or what an operator put out.

    Attributes:
        vertex: the source or operator that it comes from.
        schema: of its rows.
    """

    flow: Flow = field(repr=False)
    vertex: str
    schema: StructType

    def key_by(self, *columns: str) -> KeyedStream:
        """The same rows, sorted out by key: all of one key go to one subtask.

        Args:
            columns: the key's.

        Raises:
            SchemaError: there are no such columns, or they cannot be a key.
        """
        if not columns or len(set(columns)) != len(columns):
            raise SchemaError(
                f"The key columns are {columns}.", todo="Name one or more columns, each once."
            )
        for name in columns:
            if name not in self.schema.names:
                raise SchemaError(
                    f"The rows of {self.vertex!r} have no column {name!r} "
                    f"({', '.join(self.schema.names)}).",
                    todo="Name existing columns.",
                )
        positions = tuple(self.schema.names.index(name) for name in columns)
        KeyCodec(StructType([self.schema[position] for position in positions]))
        return KeyedStream(self, positions)

    def sink(self, sink: Sink, *, uid: str | None = None) -> ContinuousStream:
        """Write the rows to a sink; a stream may have several.

        Args:
            sink: such as a `FileSink`.
            uid: the sink's name for the life of the job; default ``sink-<vertex>``.

        Returns:
            this stream.

        Raises:
            UnsupportedTypeError: the sink has no form for a column.
            SettingError: it is no sink.
            DuplicateUidError: the name is taken.
        """
        uid = f"sink-{self.vertex}" if uid is None else uid
        self.flow.check_new(uid, "A sink")
        if not isinstance(sink, Sink):
            raise SettingError(
                f"The sink is a {type(sink).__name__}.",
                todo="Give a statebackend Sink, such as FileSink.",
            )
        sink.check(self.schema)
        self.flow.sinks[uid] = SinkNode(uid, sink, self.vertex)
        return self

    def start(
        self,
        *,
        parallelism: int | None = None,
        checkpoint_interval: Duration | None = INTERVAL,
        min_pause_s: Duration = 0.0,
        max_share: float | None = None,
        max_concurrent: int = 1,
        timeout_s: Duration = 600.0,
        alignment_timeout_s: Duration | None = None,
        mode: Mode = "exactly_once",
        tolerable_failures: int = 0,
        restart: Strategy = RESTART,
        buffer_timeout_s: Duration = 0.01,
        **more: Any,
    ) -> ContinuousQuery:
        """Start the job: everything that was built with the backend, whatever the stream.

        It goes on from its last complete checkpoint, if it has one. A time is a number of seconds,
        or a text as Spark takes it, such as "10 seconds"; a size may be "64k".

        Args:
            parallelism: subtasks of each vertex; the cluster needs as many free task slots.
                Default: the backend's, else the job's, else as many as Spark has cores.
            checkpoint_interval: from one checkpoint to the next; None: only at the end. Its name
                was ``checkpoint_interval_s``, which goes with release 0.2.
            min_pause_s: from the end of one to the begin of the next, at least.
            max_share: of the time that checkpoints may take, such as 0.1.
            max_concurrent: so many at the same time.
            timeout_s: after so long one is given up.
            alignment_timeout_s: after so long a barrier overtakes the rows that it waits for, and
                they become a part of the checkpoint; None: never.
            mode: ``exactly_once``, or ``at_least_once`` (no channel waits for another's barrier).
            tolerable_failures: so many checkpoints in a row may fail before the job does.
            restart: what happens when the job fails.
            buffer_timeout_s: how long rows wait for others to travel with.
            more: the other fields of `RunOptions`.

        Raises:
            UsageError: (one of its kinds) arguments or states do not fit; nothing was changed.
            StorageError: the store cannot be reached.
        """
        options = RunOptions.given(
            checkpoint_interval=checkpoint_interval,
            min_pause_s=min_pause_s,
            max_share=max_share,
            max_concurrent=max_concurrent,
            timeout_s=timeout_s,
            alignment_timeout_s=alignment_timeout_s,
            mode=mode,
            tolerable_failures=tolerable_failures,
            restart=restart,
            buffer_timeout_s=buffer_timeout_s,
            **more,
        )
        return start(self.flow, parallelism, options)


@dataclass(frozen=True)
class KeyedStream:
    """A stream by key: what `ContinuousStream.key_by` gives."""

    stream: ContinuousStream
    key_positions: tuple[int, ...]

    def process(
        self,
        processor: KeyedProcessor | ArrowProcessor | StatefulProcessor,
        *,
        uid: str,
        output_schema: StructType | str,
        flavour: str = "rows",
        time_mode: str = "none",
        event_time: str | None = None,
    ) -> ContinuousStream:
        """Run a processor over the rows; what it returns is the new stream.

        It is given rows as they come: in one call all of a key that came together, which may be
        one. What it returns goes on at once.

        Args:
            processor: a `KeyedProcessor`, an `ArrowProcessor`, or one of Spark's
                ``StatefulProcessor``.
            uid: the operator's name for the life of the job.
            output_schema: of its output.
            flavour: of a ``StatefulProcessor``: ``"rows"``, or ``"pandas"`` for one that was
                written for ``transformWithStateInPandas``.
            time_mode: ``"none"``, ``"processing"`` or ``"event"``, or Spark's names; event time is
                the sources': give them ``event_time`` and ``watermark_delay``.
            event_time: the column by which rows are late, and left out; None: none are.

        Raises:
            UsageError: (one of its kinds) whatever is wrong with the arguments or the processor.
        """
        flow, rows = self.stream.flow, self.stream.schema
        time_mode, timed = time_mode_of(time_mode), self.stream.vertex in flow.timed
        return _operate(
            flow,
            processor,
            flavour=flavour_of(processor, flavour),
            uid=uid,
            inputs=(Edge(self.stream.vertex, self.key_positions, timed=timed),),
            rows=rows,
            key_positions=self.key_positions,
            output_schema=output_schema,
            time_mode=time_mode,
            event_position=check_event(rows, time_mode, event_time, timed),
        )

    def connect(self, other: KeyedStream) -> ConnectedStreams:
        """Connect two streams by their keys, for one operator that sees both.

        Raises:
            SettingError: the other one is of another backend.
        """
        self._check_same(other.stream)
        return ConnectedStreams(self, other)

    def connect_broadcast(self, rules: ContinuousStream) -> BroadcastConnected:
        """Connect a stream of few rows that go to every subtask: rules, settings.

        Args:
            rules: a source's rows; one subtask reads them, so that all get them in one order.

        Raises:
            SettingError: it is an operator's, or of another backend.
        """
        self._check_same(rules)
        return BroadcastConnected(self, rules)

    def _check_same(self, other: ContinuousStream) -> None:
        if other.flow is not self.stream.flow:
            raise SettingError(
                "The two streams are of two backends.", todo="Build both with one StateBackend."
            )


@dataclass(frozen=True)
class ConnectedStreams:
    """Two streams with one keyed state: what `KeyedStream.connect` gives."""

    left: KeyedStream
    right: KeyedStream

    def process(
        self,
        processor: CoProcessor,
        *,
        uid: str,
        output_schema: StructType | str,
        time_mode: str = "none",
        event_time: str | None = None,
    ) -> ContinuousStream:
        """Run a `CoProcessor` over both. Other arguments: as `KeyedStream.process`.

        The watermark goes by the side that is behind, of those whose source makes one.

        Args:
            event_time: a column of both sides, or of one; rows of the other are never late.

        Raises:
            UsageError: (one of its kinds) whatever is wrong with the arguments or the processor.
        """
        left, right = self.left.stream, self.right.stream
        flow, time_mode = left.flow, time_mode_of(time_mode)
        timed = [side.vertex in flow.timed for side in (left, right)]
        sides = united(
            left.schema,
            right.schema,
            self.left.key_positions,
            self.right.key_positions,
            event_time,
        )
        one, other, position = sides
        check_event(one.schema, time_mode, None if event_time is None else "t", any(timed))
        edges = (
            Edge(left.vertex, self.left.key_positions, timed=timed[0], side=one),
            Edge(right.vertex, self.right.key_positions, timed=timed[1], side=other),
        )
        return _operate(
            flow,
            processor,
            flavour="sides",
            uid=uid,
            inputs=edges,
            rows=one.schema,
            key_positions=tuple(range(1, 1 + len(self.left.key_positions))),
            output_schema=output_schema,
            time_mode=time_mode,
            event_position=position,
            plan=lambda plan: replace(plan, sides=(left.schema, right.schema)),
        )


@dataclass(frozen=True)
class BroadcastConnected:
    """A stream by key, and one of few rows that every subtask sees in one order.

    What `KeyedStream.connect_broadcast` gives.
    """

    data: KeyedStream
    rules: ContinuousStream

    def __post_init__(self) -> None:
        """Refuse rules that would not come in one order.

        Raises:
            SettingError: they are an operator's, or their source is used otherwise too.
        """
        flow = self.data.stream.flow
        if self.rules.vertex not in flow.sources or self.rules.vertex == self.data.stream.vertex:
            raise SettingError(
                f"The rows of {self.rules.vertex!r} are to go to every subtask, and are not those "
                "of a source of its own.",
                todo="Broadcast a source: one subtask reads it, so that all get one order.",
            )

    def process(
        self,
        processor: BroadcastProcessor,
        *,
        uid: str,
        output_schema: StructType | str,
        time_mode: str = "none",
        event_time: str | None = None,
    ) -> ContinuousStream:
        """Run a `BroadcastProcessor` over both. Other arguments: as `KeyedStream.process`.

        Rules have no event time: the watermark is that of the data.

        Raises:
            UsageError: (one of its kinds) whatever is wrong with the arguments or the processor.
        """
        data, rules = self.data.stream, self.rules
        flow = data.flow
        timed = data.vertex in flow.timed
        time_mode = time_mode_of(time_mode)
        position = check_event(data.schema, time_mode, event_time, timed)
        return _operate(
            flow,
            processor,
            flavour="broadcast",
            uid=uid,
            inputs=(
                Edge(data.vertex, self.data.key_positions, timed=timed),
                Edge(rules.vertex, (), timed=False),
            ),
            rows=data.schema,
            key_positions=self.data.key_positions,
            output_schema=output_schema,
            time_mode=time_mode,
            event_position=position,
            plan=lambda plan: replace(plan, rules_schema=rules.schema),
        )


def _operate(
    flow: Flow,
    processor: Any,
    *,
    flavour: str,
    uid: str,
    inputs: tuple[Edge, ...],
    rows: StructType,
    key_positions: tuple[int, ...],
    output_schema: StructType | str,
    time_mode: str,
    event_position: int | None,
    plan: Callable[[OperatorPlan], OperatorPlan] = lambda plan: plan,
) -> ContinuousStream:
    """Add an operator to a flow.

    Args:
        rows: what it is given, ``key_positions`` and ``event_position`` among their columns.
        plan: what is to be said of the plan beside that.

    Raises:
        UsageError: (one of its kinds) whatever is wrong with the arguments or the processor.
    """
    flow.check_new(uid, "An operator")
    output = parse_schema(output_schema, f"the output of operator {uid!r}")
    check_value_schema(output)
    arrow_schema(output)
    packed = pack(processor, uid=uid, limit_bytes=flow.setup.settings.constant_bytes)
    declared = recorder(flavour)(packed.rehearsal(), uid, time_mode)
    made = OperatorPlan(
        uid=uid,
        flavour=flavour,
        input_schema=rows,
        key_positions=key_positions,
        output_schema=output,
        states=declared.declared,
        time_mode=time_mode,
        withdrawn=frozenset(declared.withdrawn),
    )
    vertex = KeyedVertex(uid, inputs)
    flow.operations[uid] = Operation(vertex, plan(made), packed, declared, event_position)
    if any(edge.timed for edge in inputs):
        flow.timed.add(uid)
    return ContinuousStream(flow, uid, output)
