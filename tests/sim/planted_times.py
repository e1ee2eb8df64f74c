"""Planted bugs of what goes by time, and of what a job begins with; see `planted`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

import recovery.restore.restorer
import snapshot.protocol.running_operator as running
import statebackend.runtime.driver.session as session
import statebackend.spark.start.launch as launch
import statebackend.state.timers as timers
from snapshot.barriers.job_watermark import JobTime, OperatorTime
from snapshot.formats.delta import DeltaRows
from snapshot.protocol.running_operator import RunningOperator
from statebackend.operators.epoch_phases import OperatorPhases
from statebackend.state.timers import BY_TIME, TimerIndex
from statebackend.state.ttl_cells import ExpiryIndex
from tests.planted.bug import Patches
from tests.sim.clocks import BEGAN_MS
from tests.sim.kernel import current

__all__ = [
    "due_below",
    "due_by_the_wall_clock",
    "expires_by_the_watermark",
    "fired_stays",
    "initial_at_each_epoch",
    "initial_at_each_start",
    "initial_lost_at_a_repeat",
    "late_by_the_watermark_in_force",
    "layers_not_asked",
    "let_in_without_initial",
    "look_moves_the_watermark",
    "time_never_goes_back",
    "timers_lost_in_a_rescale",
    "watermark_of_the_batch_before",
]


def timers_lost_in_a_rescale() -> Patches:
    really = recovery.restore.restorer.clip_pieces

    def clip_pieces(rows: Iterable[DeltaRows], first: int, last: int) -> Any:
        for piece in really(rows, first, last):
            timed = pc.equal(pc.binary_slice(piece.keys, 2, 4), pa.scalar(BY_TIME, pa.binary()))
            kept = pc.invert(timed)
            yield DeltaRows(piece.keys.filter(kept), piece.values.filter(kept))

    yield recovery.restore.restorer, "clip_pieces", clip_pieces


def layers_not_asked() -> Patches:
    really = TimerIndex._collect

    def collect(self: TimerIndex, key_groups: range, limit: bytes) -> Any:
        frozen, self._table._frozen = self._table._frozen, []
        try:
            return really(self, key_groups, limit)
        finally:
            self._table._frozen = frozen

    yield TimerIndex, "_collect", collect


def fired_stays() -> Patches:
    yield TimerIndex, "fired", lambda self, at_ms: None


def due_by_the_wall_clock() -> Patches:
    yield OperatorPhases, "_now_ms", property(lambda self: BEGAN_MS + _wall_ms())


def _wall_ms() -> int:
    return int(current().sched.now_s * 1000)


def due_below() -> Patches:
    yield timers, "DUE_AT_LIMIT", False


def time_never_goes_back() -> Patches:
    newest = [0]

    def now_ms(self: OperatorPhases) -> int:
        newest[0] = max(newest[0], self._times.processing_time_ms)
        return newest[0]

    yield OperatorPhases, "_now_ms", property(now_ms)


def expires_by_the_watermark() -> Patches:
    def clean(self: OperatorPhases) -> int:
        return ExpiryIndex(self._table).clean(self._key_groups, self._times.watermark_ms, 20_000)

    yield OperatorPhases, "_clean", clean


def look_moves_the_watermark() -> Patches:
    really = RunningOperator.next_epoch

    def next_epoch(self: RunningOperator, epoch: int, *, asynchronous: bool) -> None:
        looked = self.time_after(dict(self.epoch._latest))
        really(self, epoch, asynchronous=asynchronous)
        self.event_max_ms = looked.event_max_ms

    yield RunningOperator, "next_epoch", next_epoch


def watermark_of_the_batch_before() -> Patches:
    def resumed(
        before: Iterable[int | None],
        operators: Iterable[OperatorTime],
        again: Iterable[int | None] = (),
    ) -> JobTime:
        last_ms = max((ms for ms in before if ms is not None), default=0)
        return JobTime(last_ms, last_ms)

    yield running, "resumed", resumed


def late_by_the_watermark_in_force() -> Patches:
    really = session.begin_reply

    def reply(*arguments: Any, **named: Any) -> Any:
        made = really(*arguments, **named)
        return msgspec.structs.replace(made, late_watermark_ms=made.watermark_ms)

    yield session, "begin_reply", reply


def initial_at_each_epoch() -> Patches:
    yield RunningOperator, "_is_first", True


def initial_at_each_start() -> Patches:
    yield launch, "takes_initial", lambda lineage, first_epoch: True
    yield RunningOperator, "_is_first", property(lambda self: not self.acked)


def initial_lost_at_a_repeat() -> Patches:
    yield launch, "takes_initial", lambda lineage, first_epoch: lineage is None


def let_in_without_initial() -> Patches:
    def nothing(manifests: Any, given: Mapping[str, bool], first_epoch: int) -> list[str]:
        return []

    yield launch, "lacks_initial", nothing
