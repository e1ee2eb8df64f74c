"""A batch has the same watermark at each evaluation, and a record says which timer is next."""

from __future__ import annotations

from snapshot.formats.record import Record
from snapshot.protocol.messages import BeginReply
from tests.sim.checkers.ledger import Checker
from tests.sim.task import Attempt
from tests.sim.timemodel import next_timer_ms

__all__ = ["Times"]


class Times(Checker):
    """Compares times with the model."""

    name = "times"

    def record(self, sequence: int, record: Record) -> None:
        """Comes after the checker of states, which has its state."""
        manifest = record.manifest
        if manifest.kind != "checkpoint" or manifest.operator != "op":
            return
        if not self.world.config.timed or sequence < self.world.once.newest:
            return
        expected = next_timer_ms(self.world.once.durable[manifest.epoch])
        if manifest.next_timer_ms != expected:
            self.violated(
                f"record {sequence} has its next timer at {manifest.next_timer_ms}, not {expected}"
            )

    def begun(self, attempt: Attempt, reply: BeginReply) -> None:
        """What an attempt is told is what follows from the batches before."""
        clock = attempt.clock
        if clock is None:
            return
        told = reply.watermark_ms, reply.late_watermark_ms
        if told != (clock.watermark_ms, clock.late_ms):
            self.violated(
                f"{attempt} is told the watermarks {told}, "
                f"not {(clock.watermark_ms, clock.late_ms)}"
            )
