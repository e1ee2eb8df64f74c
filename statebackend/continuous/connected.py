"""Operators of two inputs: two streams by key, or one by key and one that goes to every subtask."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyspark.sql.types import StructType

from statebackend.api.processors import BroadcastProcessor, CoProcessor
from statebackend.continuous.dataflow import ContinuousStream, KeyedStream, check_event, operate
from statebackend.continuous.graph import Edge
from statebackend.continuous.twosides import united
from statebackend.errors import SettingError

__all__ = ["BroadcastConnected", "ConnectedStreams"]


@dataclass(frozen=True)
class ConnectedStreams:
    """Two streams with one keyed state."""

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
        """A `CoProcessor` on both; arguments as `KeyedStream.process`.

        The watermark goes by the side that is behind, of those whose source makes one.

        Args:
            event_time: a column of both sides, or of one; rows of the other are never late.

        Raises:
            UsageError: (one of its kinds) whatever is wrong with the arguments or the processor.
        """
        left, right = self.left.stream, self.right.stream
        flow = left.flow
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
        return operate(
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
    """A stream by key, and one of few rows that every subtask sees, each in one order."""

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
        """A `BroadcastProcessor` on both; arguments as `KeyedStream.process`.

        Rules have no event time: the watermark is that of the data.

        Raises:
            UsageError: (one of its kinds) whatever is wrong with the arguments or the processor.
        """
        data, rules = self.data.stream, self.rules
        flow = data.flow
        timed = data.vertex in flow.timed
        position = check_event(data.schema, time_mode, event_time, timed)
        return operate(
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
