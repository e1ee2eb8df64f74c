"""The dataflow of a continuous job as data: vertices, and the channels between their subtasks.

A *vertex* is a source or a keyed operator; a sink is chained to the vertex that feeds it and runs
in its thread. Every vertex has the job's parallelism, and subtask i of each is in slot i. Over an
edge every subtask of the one vertex has a channel to every subtask of the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from snapshot.barriers.pending_checkpoints import Subtask
from statebackend.continuous.sinks.sink import Sink
from statebackend.continuous.sources.generated_source import GeneratedSource
from statebackend.continuous.sources.source import Source
from statebackend.continuous.worker.two_inputs import Side

__all__ = ["Edge", "Graph", "KeyedVertex", "SinkNode", "SourceVertex", "reads_together"]


def reads_together(source: Source) -> bool:
    """Whether a subtask reads all its splits by turns, and not one after the other.

    Those that have rows of all of the time must be: one that came later would be late as a whole.
    """
    return not source.splits_end or isinstance(source, GeneratedSource)


@dataclass(frozen=True)
class Edge:
    """An input of a keyed vertex.

    Attributes:
        upstream: the vertex that it comes from.
        key_positions: of the key among the upstream's columns; () if all rows go to all subtasks.
        timed: whether the operator's watermark goes by it.
        side: of two inputs that share their keys: how its rows are shown as the operator's.
    """

    upstream: str
    key_positions: tuple[int, ...]
    timed: bool = True
    side: Side | None = None


@dataclass(frozen=True)
class SourceVertex:
    """A source, by its name."""

    uid: str
    source: Source


@dataclass(frozen=True)
class KeyedVertex:
    """A keyed operator, by its uid."""

    uid: str
    inputs: tuple[Edge, ...]


@dataclass(frozen=True)
class SinkNode:
    """A sink, and the vertex whose rows it takes."""

    uid: str
    sink: Sink
    upstream: str


@dataclass(frozen=True)
class Graph:
    """The whole.

    Channels into a subtask are numbered edge by edge, upstream subtask by upstream subtask.
    """

    parallelism: int
    max_parallelism: int
    sources: Mapping[str, SourceVertex] = field(default_factory=dict)
    keyed: Mapping[str, KeyedVertex] = field(default_factory=dict)
    sinks: Mapping[str, SinkNode] = field(default_factory=dict)

    @property
    def single(self) -> frozenset[str]:
        """Sources that one subtask reads alone: whoever gets all rows gets them in one order."""
        edges = [edge for vertex in self.keyed.values() for edge in vertex.inputs]
        return frozenset(edge.upstream for edge in edges if not edge.key_positions)

    @property
    def vertices(self) -> list[str]:
        """Sources, then keyed vertices, in the order in which they were made."""
        return [*self.sources, *self.keyed]

    @property
    def subtasks(self) -> list[Subtask]:
        """Of every vertex."""
        return [Subtask(v, i) for v in self.vertices for i in range(self.parallelism)]

    def channels(self, vertex: str) -> int:
        """How many come into each subtask of a vertex."""
        return len(self.inputs(vertex)) * self.parallelism

    def inputs(self, vertex: str) -> Sequence[Edge]:
        """The edges into a vertex."""
        return self.keyed[vertex].inputs if vertex in self.keyed else ()

    def channel(self, edge: int, upstream_subtask: int) -> int:
        """The number of a channel among its receiver's."""
        return edge * self.parallelism + upstream_subtask

    def outputs(self, vertex: str) -> list[tuple[str, int, Edge]]:
        """The edges out of a vertex: the vertex they go to, their number there, and themselves."""
        return [
            (to.uid, number, edge)
            for to in self.keyed.values()
            for number, edge in enumerate(to.inputs)
            if edge.upstream == vertex
        ]

    def sinks_of(self, vertex: str) -> list[SinkNode]:
        """The sinks that are chained to a vertex."""
        return [sink for sink in self.sinks.values() if sink.upstream == vertex]
