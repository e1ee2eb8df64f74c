"""Every completed cut is consistent.

For each channel, what its receiver's part has received, and what lies in flight in the cut, is what
its sender's part has sent: nothing was received that was not sent before the sender's part, and
nothing is lost between. Rows in flight are those that come next in their channel, in their order.

And by content, independently of the channels' counts: what the sources' positions say was read,
less what is in flight on the way, is what every operator's state has counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapshot.barriers.pending_checkpoints import Subtask
from tests.channels.checkers.base import Checker
from tests.channels.plan import BROADCAST, SPLIT, final_row, mix

if TYPE_CHECKING:
    from tests.channels.driver import Record

__all__ = ["Cut", "expected"]

Sum = tuple[int, int]  # how many rows, and the sum of their mixes: tells multisets apart


class Cut(Checker):
    """Called when a record is durable."""

    name = "cut"

    def appended(self, record: Record) -> None:
        config = self.world.config
        exact = config.mode == "exactly_once"
        aligned = record.kind == "checkpoint" or not record.flight
        self.must(aligned, f"epoch {record.epoch}: a {record.kind} with rows in flight")
        self._channels(record, exact)
        for subtask, part in record.parts.items():
            self.must(
                record.state[subtask] == part.whole,
                f"epoch {record.epoch}: the deltas of {subtask} do not make up its state",
            )
        inputs, gives = expected(self, record)
        for vertex in config.vertices:
            mine = range(record.parallelism[vertex.number])
            if vertex.kind == "keyed":
                states = [record.state[Subtask(vertex.name, index)] for index in mine]
                have = _total([(n, total) for state in states for n, total, _ in state.values()])
                self._same(vertex.name, have, inputs[vertex.number], exact)
            for index in mine:
                rules = record.parts[Subtask(vertex.name, index)].rules
                wanted = self._rules(record, vertex.number, index, gives)
                self._same(f"{vertex.name} {index}: rules", rules, wanted, exact)

    def _channels(self, record: Record, exact: bool) -> None:
        flight = record.flight
        received = {c: n for part in record.parts.values() for c, n in part.received.items()}
        sent = {c: n for part in record.parts.values() for c, n in part.sent.items()}
        self.must(received.keys() == sent.keys(), "parts are of different channels")
        for channel, out in sent.items():
            rows = flight.get(channel, [])
            at = received[channel]
            where = f"epoch {record.epoch}, channel {channel}"
            if exact:
                seqs = [row.seq for row in rows]
                self.must(
                    seqs == list(range(at, at + len(rows))),
                    f"{where}: received {at}, in flight {seqs}",
                )
                self.must(
                    at + len(rows) == out,
                    f"{where}: sent {out}, received {at}, in flight {len(rows)}",
                )
            else:
                self.must(not rows and at >= out, f"{where}: sent {out}, received {at}")

    def _rules(self, record: Record, vertex: int, index: int, gives: dict[int, Sum]) -> Sum:
        """What a subtask must have of its broadcast inputs."""
        count = total = 0
        for rule in self.world.config.edges:
            if rule.receiver == vertex and rule.how == BROADCAST:
                count += gives[rule.sender][0]
                total += gives[rule.sender][1]
                for (number, _, receiver), rows in record.flight.items():
                    if number == rule.number and receiver == index:
                        count -= len(rows)
                        total -= sum(mix(row.row) for row in rows)
        return count, total

    def _same(self, where: str, have: Sum, wanted: Sum, exact: bool) -> None:
        holds = have == wanted if exact else have[0] >= wanted[0]
        self.must(holds, f"{where} holds {have[0]} rows of the cut's {wanted[0]}")


def expected(checker: Checker, record: Record) -> tuple[dict[int, Sum], dict[int, Sum]]:
    """What every vertex has taken in, and what it has given, by the sources' positions."""
    config = checker.world.config
    inputs: dict[int, Sum] = {}
    gives: dict[int, Sum] = {}
    flight: dict[int, list[Sum]] = {}
    for (number, _, _), rows in record.flight.items():
        flight.setdefault(number, []).extend((-1, -mix(row.row)) for row in rows)
    for vertex in config.vertices:
        parts = [p for s, p in record.parts.items() if s.vertex == vertex.name]
        read = [(s, at) for part in parts for s, at in part.positions.items()]
        checker.must(
            sorted(s for s, _ in read) == sorted(vertex.splits), f"{vertex.name}: splits {read}"
        )
        taken = [(1, mix(s * SPLIT + i)) for s, at in read for i in range(at)]
        for edge in config.edges:
            if edge.receiver == vertex.number and edge.how != BROADCAST:
                taken += [gives[edge.sender], *flight.get(edge.number, [])]
        inputs[vertex.number] = _total(taken)
        last = [
            (1, mix(final_row(vertex.number, key, n, total)))
            for subtask, state in record.state.items()
            if subtask.vertex == vertex.name
            for key, (n, total, said) in state.items()
            if said
        ]
        gives[vertex.number] = _total([inputs[vertex.number], *last])
    return inputs, gives


def _total(sums: list[Sum]) -> Sum:
    return sum(n for n, _ in sums), sum(total for _, total in sums)
