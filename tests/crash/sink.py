"""A sink of files on a disk that fails once at every operation, run after run, and then a cut.

What a checkpoint names is durable elsewhere (its record). Each run commits that once more, sweeps
what was staged before it, and goes on from there; one that meets an error is replaced by the next,
in a process that knows nothing of what the one before had synced.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pyarrow as pa

from statebackend.continuous.sinks.file_sink import FileSink
from statebackend.continuous.sinks.sink import SinkContext, run_name
from statebackend.errors import ConnectorError, StateBackendError
from tests.crash.disk import Op, after_a_cut, pending, write_image
from tests.crash.failures import CODES, Failed, FailsFrom
from tests.crash.recorder import Fail, Recorder

__all__ = ["try_sink"]

JOB, UID = "clicks", "out"
CHECKPOINTS: Final = 4
TRIES: Final = 8


@dataclass
class _Written:
    """What a job knows of its sink: how many rows are in durable checkpoints, and their files."""

    ops: Sequence[Op] = ()
    rows: int = 0
    prepared: list[bytes] = field(default_factory=list)
    runs: int = 0
    refused: list[ConnectorError] = field(default_factory=list)

    def run(self, folder: Path) -> None:
        """One run of the job, in a process of its own; to its end."""
        self.runs += 1
        name, sink = run_name(self.runs, f"r{self.runs}"), FileSink(folder, format="json")
        committer = sink.committer(JOB, UID)
        committer.commit(self.prepared)
        committer.sweep(name)
        writer = sink.open(SinkContext(JOB, UID, name, 0, 1))
        while self.rows < 2 * CHECKPOINTS:
            values = [self.rows, self.rows + 1]
            try:
                writer.write(pa.record_batch({"n": pa.array(values, pa.int64())}))
                prepared = writer.prepare(self.rows)
            except BaseException:
                writer.abort()
                raise
            self.rows, self.prepared = self.rows + 2, prepared  # the record is durable
            committer.commit(prepared)


def _lived(root: Path, fail: Fail | None) -> _Written:
    root.mkdir(parents=True)
    recorder, written = Recorder(root, lambda kind, path: "output", fail), _Written()
    written.ops = recorder.ops
    with recorder:
        for _ in range(TRIES):
            try:
                written.run(root / "out")
                return written
            except ConnectorError as error:
                written.refused.append(error)
    raise AssertionError(f"the sink cannot be used any more: {written.refused[-1]}")


def _visible(folder: Path) -> list[int]:
    files = sorted(folder.glob("part-*.json"))
    return sorted(json.loads(line)["n"] for file in files for line in file.read_text().splitlines())


def try_sink(root: Path, share: tuple[int, int] = (0, 1)) -> Failed:
    """Fail every operation, one life for each, and cut the power after each of its runs' ends.

    Args:
        root: an empty folder.
        share: of (part, parts): every so-many-th operation, beginning with that one.
    """
    never = FailsFrom(-1, 0)
    _lived(root / "whole", never)
    failed = Failed(operations=never.asked)
    for number in range(share[0], never.asked, share[1]):
        for code, times in CODES:
            plan = FailsFrom(number, code, times)
            failed.failures += 1
            place = root / f"{number}-{code}"
            try:
                written = _lived(place / "life", plan)
                failed.errors.update(error.code for error in written.refused)
                failed.unnoticed += not written.refused
                _check(written, place / "again")
            except (AssertionError, StateBackendError) as error:
                failed.violations.append(f"{number}, {plan.first}: {error}")
    return failed


def _check(written: _Written, root: Path) -> None:
    left = pending(written.ops)
    image = after_a_cut(written.ops, frozenset(left.names), dict.fromkeys(left.files, "lost"))
    write_image(image, root)
    written.run(root / "out")
    found = _visible(root / "out")
    assert found == [*range(2 * CHECKPOINTS)], f"visible after the cut: {found}"
