"""Savepoints that a drill has taken, at its end: each is read, and the first and last begun with.

A clone is a job of its own that begins with a savepoint and reads the same input to its end. What
the original put out up to the savepoint, and the clone after it, must be the truth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from recovery.drill.driver.driver_messages import Taken
from recovery.drill.jobs import batch_sink as sink
from recovery.drill.jobs.committed_epochs import committed_epochs
from recovery.drill.report.drill_report import Verdict
from recovery.drill.report.output_check import check
from recovery.drill.run.live_stage import LiveStage

__all__ = ["check_savepoints", "clone_verdict", "to_be_cloned"]

_EXAMPLES_MAX: Final = 3


def check_savepoints(stage: LiveStage, timeout_s: float) -> list[str]:
    """What is wrong with the savepoints of a job that has ended; empty if all is well.

    Raises:
        DrillError: the drill cannot go on.
    """
    taken = stage.savepoints.taken
    wrong = []
    for one in taken:
        found = stage.savepoints.look("verify", one.uri)
        stage.say(f"the savepoint of epoch {one.epoch} is {'damaged' if found else 'whole'}")
        wrong += [f"savepoint of epoch {one.epoch}: {problem}" for problem in found]
    for number, one in enumerate(() if wrong else to_be_cloned(taken), start=1):
        wrong += _cloned(stage, one, number, timeout_s)
    return wrong


def to_be_cloned(taken: Sequence[Taken]) -> list[Taken]:
    """The first and the last: a soak may have many, and each clone is a whole job."""
    return [taken[n] for n in sorted({0, len(taken) - 1})] if taken else []


def _cloned(stage: LiveStage, taken: Taken, number: int, timeout_s: float) -> list[str]:
    """Run a clone to its end, and compare."""
    folder = stage.root / "clones" / str(number)
    folder.mkdir(parents=True)
    checkpoint, out = folder / "checkpoint", folder / "out"
    stage.say(f"a clone begins with the savepoint of epoch {taken.epoch}")
    failure = stage.run_to_its_end(
        timeout_s,
        job=f"clone-{number}",
        savepoint=taken.uri,
        checkpoint=str(checkpoint),
        out=str(out),
    )
    if failure:
        return [f"clone from epoch {taken.epoch}: it failed: {failure[:500]}"]
    verdict = clone_verdict(
        stage.job.truth(stage.root),
        stage.root / "out",
        out,
        epoch=taken.epoch,
        last=max(committed_epochs(checkpoint), default=-1),
        keys=stage.job.keys,
    )
    stage.say(f"the clone is {'exact' if verdict.exact else 'not exact'}")
    return [
        f"clone from epoch {taken.epoch}: {example}"
        for example in ([] if verdict.exact else verdict.examples or [verdict.failure])
    ][:_EXAMPLES_MAX]


def clone_verdict(
    truth: Iterable[Sequence[Any]],
    original: Path,
    clone: Path,
    *,
    epoch: int,
    last: int,
    keys: Sequence[str] | None,
) -> Verdict:
    """Compare the original's output up to a savepoint, and the clone's after it, with the truth.

    Args:
        original, clone: folders of output. epoch: of the savepoint.
        last: that the clone has committed.
    """
    rows = [row for _, row in sink.rows_in(original, epoch)]
    failure = "" if last > epoch else "it put nothing out"
    for batch, row in sink.rows_in(clone, last):
        rows.append(row)
        if batch <= epoch:
            failure = f"it has put out batch {batch} again"
    return check(truth, rows, keys=keys, failure=failure, schema=sink.schema_of(original))
