"""Planted bugs of what makes a query a whole job: operator state; see `planted`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import snapshot.coordinator as coordinator
import statebackend.spark.operatorstate as product
from snapshot.operatorstate import OperatorBlobs
from snapshot.running import RunningOperator
from statebackend.spark.operatorstate import OperatorStateIO
from tests.planted.bug import Patches

__all__ = ["look_is_gone_on_from", "names_outlive_epochs", "not_dealt_out"]


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
