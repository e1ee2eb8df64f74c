"""Whether a savepoint is whole: its state, and its part of Spark's checkpoint location."""

from __future__ import annotations

import dataclasses

from blake3 import blake3

from recovery.inspect.verify import Finding, VerifyReport, verify
from recovery.savepoints.savepoint import SPARK_FOLDER, Savepoint, read_savepoint
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import CorruptionError, NotRestorableError, ObjectNotFoundError
from statebackend.work_done import Progress

__all__ = ["verify_savepoint"]


def verify_savepoint(store: ObjectStore, *, progress: Progress | None = None) -> VerifyReport:
    """Every byte of a savepoint, as :func:`recovery.inspect.verify.verify` has it for a job.

    Raises:
        NotRestorableError: there is none. CorruptionError: `savepoint.json` does not read.
    """
    savepoint = read_savepoint(store)
    report = verify(store, savepoint.job, progress=progress)
    found = [*report.findings, *_epochs(savepoint, report), *_spark(store, savepoint)]
    return dataclasses.replace(report, findings=found)


def _epochs(savepoint: Savepoint, report: VerifyReport) -> list[Finding]:
    return [
        Finding(
            code=NotRestorableError.code,
            object="",
            operator=one.uid,
            epoch=one.epoch,
            problem=f"Epoch {one.epoch} of operator {one.uid!r} cannot be restored from its log.",
            means="No query can begin with this savepoint.",
        )
        for one in savepoint.operators
        if not report.startable or one.epoch not in report.restorable.get(one.uid, [])
    ]


def _spark(store: ObjectStore, savepoint: Savepoint) -> list[Finding]:
    found = []
    for file in savepoint.spark:
        name = f"{SPARK_FOLDER}{file.name}"
        try:
            data = store.get(name)
        except ObjectNotFoundError:
            code, problem = ObjectNotFoundError.code, "It is not there."
        else:
            if (len(data), blake3(data).hexdigest()) == (file.size_bytes, file.digest):
                continue
            code, problem = CorruptionError.code, "It is not what savepoint.json names."
        means = "No query can begin with this savepoint."
        found.append(Finding(code=code, object=name, problem=problem, means=means))
    return found
