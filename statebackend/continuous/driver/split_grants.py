"""Hands out the splits of the sources of a run: who has asked, and who gets which."""

from __future__ import annotations

from collections.abc import Mapping

from snapshot.barriers.pending_checkpoints import Subtask
from statebackend.continuous.driver.effect_types import Send
from statebackend.continuous.driver.run_slots import RunSlots
from statebackend.continuous.job.graph import Graph, reads_together
from statebackend.continuous.job.slot_messages import Grant
from statebackend.continuous.sources.split_assigner import SplitAssigner, Wait
from statebackend.continuous.sources.split_assignment import Assignment

__all__ = ["SplitGrants"]


class SplitGrants:
    """Answers requests for splits.

    Args:
        assigners: of the sources, by vertex. slots: is asked where a subtask runs.
    """

    def __init__(
        self, graph: Graph, assigners: Mapping[str, SplitAssigner], slots: RunSlots
    ) -> None:
        self._graph, self._slots = graph, slots
        self.assigners, self._single = assigners, graph.single
        self._in_vain: dict[Subtask, int] = {}  # the newest requests that got no split yet
        # By source: who has asked for a first split, by which number; gone once all have.
        self._first: dict[str, dict[int, int]] = {vertex: {} for vertex in assigners}

    def asked(self, subtask: Subtask, number: int) -> list[Send]:
        """A source's subtask wants a split.

        The first ones are handed out when every subtask has asked: each gets its share, and a
        watermark does not run ahead of a subtask that is only slow to start.
        """
        first = self._first.get(subtask.vertex)
        if first is None:
            return [self._granted(subtask, number)]
        first[subtask.index] = number
        if len(first) < self._graph.parallelism:
            return []
        del self._first[subtask.vertex]
        return [
            self._granted(Subtask(subtask.vertex, index), first[index]) for index in sorted(first)
        ]

    def _granted(self, subtask: Subtask, number: int) -> Send:
        answer = None
        if self._may_read(subtask):
            answer = self.assigners[subtask.vertex].request(subtask.index, number)
        if isinstance(answer, Assignment) or answer is None:
            self._in_vain.pop(subtask, None)
        else:
            self._in_vain[subtask] = number
        return self._send(subtask, number, answer)

    def passed(self, subtask: Subtask, checkpoint: int) -> list[Send]:
        """A source's subtask has acked a checkpoint: a split for it if it asked in vain before.

        It comes before the next barrier. Else nobody gets any more where checkpoint follows on
        checkpoint.
        """
        if subtask.vertex not in self.assigners or not self._may_read(subtask):
            return []
        assigner = self.assigners[subtask.vertex]
        assigner.passed(subtask.index, checkpoint)
        number = self._in_vain.get(subtask)
        if number is None:
            return []
        answer = assigner.request(subtask.index, number)
        if not isinstance(answer, Assignment):
            return []
        del self._in_vain[subtask]
        return [self._send(subtask, number, answer)]

    def _send(self, subtask: Subtask, number: int, answer: Assignment | Wait | None) -> Send:
        grant = Grant(
            vertex=subtask.vertex,
            subtask=subtask.index,
            number=number,
            assignment=answer if isinstance(answer, Assignment) else None,
            over=answer is None,
            held_back=answer is not None and self._held_back(subtask.vertex),
        )
        return Send(self._slots.slot_of[subtask.index], grant)

    def _held_back(self, vertex: str) -> bool:
        source = self._graph.sources[vertex].source
        return reads_together(source) and bool(self.assigners[vertex].pending)

    def _may_read(self, subtask: Subtask) -> bool:
        return not subtask.index or subtask.vertex not in self._single

    def ended(self, subtask: Subtask, split: str) -> None:
        """A source's subtask has read a split to its end."""
        self.assigners[subtask.vertex].finished(subtask.index, split)

    def wait_for_barrier(self) -> bool:
        """Whether a subtask waits for a split until a barrier is through."""
        waits = (self.assigners[one.vertex].waits_for_barrier(one.index) for one in self._in_vain)
        return any(waits)
