"""Planted bugs of whole jobs: operator state, and several operators; see `planted`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import snapshot.protocol.coordinator as coordinator
import statebackend.runtime.worker.operator_state_io as product
from snapshot.formats.history_object import RecordSummary
from snapshot.protocol.epoch_acks import EpochState
from snapshot.protocol.operator_state_slices import OperatorBlobs
from snapshot.protocol.record_commits import RecordCommits
from snapshot.protocol.running_operator import RunningOperator
from snapshot.retention import history_keeping
from statebackend.runtime.driver.session import RunSession
from statebackend.runtime.worker.operator_state_io import OperatorStateIO
from statebackend.spark.start.start_point import StartPoint
from tests.planted.bug import Patches

__all__ = [
    "first_operator_counts",
    "first_record_waited_for",
    "furthest_operator_counts",
    "look_is_gone_on_from",
    "names_outlive_epochs",
    "not_dealt_out",
    "not_summed_up",
    "runs_are_compared",
]


def not_summed_up() -> Patches:
    really = history_keeping._objects

    def objects(summaries: Sequence[RecordSummary], newest_epoch: int) -> Any:
        return really(summaries[1:], newest_epoch)

    yield history_keeping, "_objects", objects


def names_outlive_epochs() -> Patches:
    names: dict[str, str] = {}
    really = OperatorStateIO._part

    def part(
        self: OperatorStateIO,
        blob: bytes,
        digest: str,
        rows: int,
        given: Mapping[str, str],
        new_name: str,
        budget_bytes: int,
    ) -> Any:
        made = really(self, blob, digest, rows, {**names, **given}, new_name, budget_bytes)
        if made.name:
            names[digest] = made.name
        return made

    # The driver of then asked nothing about it, either.
    yield coordinator, "check_ack_objects", lambda ack, generation, given: None
    yield OperatorStateIO, "_part", part


def not_dealt_out() -> Patches:
    def redistribute(old: Sequence[Any], parallelism: int, index: int) -> Any:
        return old[index] if index < len(old) else {}

    yield product, "redistribute", redistribute


def look_is_gone_on_from() -> Patches:
    really = RunningOperator.next_epoch

    def next_epoch(self: RunningOperator, epoch: int, *, asynchronous: bool) -> None:
        latest = dict(self.epoch._latest)
        really(self, epoch, asynchronous=asynchronous)
        self.blobs = OperatorBlobs.of_acks(latest)

    yield RunningOperator, "next_epoch", next_epoch


def first_operator_counts() -> Patches:
    def oldest_needed(self: RecordCommits) -> int:
        assert self._run.epoch is not None
        first = next(iter(self._run.operators.values()))
        return first.oldest_needed(self._run.epoch) or 0

    yield RecordCommits, "_oldest_needed", oldest_needed


def first_record_waited_for() -> Patches:
    really = RunSession._commit_behind

    def behind(self: RunSession, coordinator: Any, tenure: Any, ack: Any) -> Any:
        before = really(self, coordinator, tenure, ack)
        return before if ack.operator == "op" else None

    yield RunSession, "_commit_behind", behind


def furthest_operator_counts() -> Patches:
    really = StartPoint._known

    def known(self: StartPoint, manifests: Any) -> Any:
        progress = really(self, manifests)
        newest = max(progress.last_epochs.values(), default=-1)
        return replace(progress, last_epochs=dict.fromkeys(progress.last_epochs, newest))

    yield StartPoint, "_known", known


def runs_are_compared() -> Patches:
    yield EpochState, "stage_runs", lambda self: [self.acks]
