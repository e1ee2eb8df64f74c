"""Planted bugs of savepoints; see `planted`."""

from __future__ import annotations

import contextlib
from typing import Any

import recovery.savepoints.create_savepoint as making
import statebackend.spark.start.query_from_savepoint as product
from recovery.inspect.job_list import SAVEPOINT_NAME
from recovery.savepoints.begin_with_savepoint import Beginning, Standing
from recovery.savepoints.location_files import query_id_of
from recovery.savepoints.savepoint import encode_savepoint
from recovery.savepoints.state_at_epoch import last_epochs
from recovery.savepoints.state_copy import Copied
from statebackend.errors import CheckpointLocationError, NotRestorableError
from statebackend.runtime.driver.background_cleaning import Cleaner
from tests.planted.bug import Patches

__all__ = ["cleaner_not_held", "cut_is_begun", "json_first", "tip_of_the_log"]


def json_first() -> Patches:
    really = making._made

    def made(one: Any, state: Any, names: Any, folder: Any) -> Any:
        asked = query_id_of(one.location)
        store = folder.store
        said = making._described(one, state, Copied(0, {}), [], folder.begun, asked, store)
        store.put(SAVEPOINT_NAME, [encode_savepoint(said)])
        return really(one, state, names, folder)

    yield making, "_made", made


def tip_of_the_log() -> Patches:
    def epoch_to_save(manifests: Any, batches: Any) -> int:
        epoch = min(last_epochs(manifests).values(), default=-1)
        if epoch < 0:
            raise NotRestorableError("There is nothing to save yet.")
        return epoch

    def files_of(location: Any, epoch: int) -> list[str]:
        wanted = [f"offsets/{epoch}", f"commits/{epoch}"]
        there = {*location.list("offsets"), *location.list("commits")}
        return [name for name in wanted if name in there]

    yield making, "epoch_to_save", epoch_to_save
    yield making, "files_of", files_of


def cleaner_not_held() -> Patches:
    yield Cleaner, "held", lambda self, timeout_s=None: contextlib.nullcontext()


def cut_is_begun() -> Patches:
    really = product.standing

    def standing(log: Any, job: str, savepoint: Any) -> Beginning:
        found = really(log, job, savepoint)
        if found.standing is not Standing.CUT:
            return found
        try:
            return Beginning(Standing.BEGUN, log.manifests()[-1].query_id)
        except IndexError:
            raise CheckpointLocationError("The log is being written.") from None

    yield product, "standing", standing
