"""Two steps beside a job's life: going back by a batch, and what a process spills.

Spark's file-system layer is in the JVM. Here one of our own stands in for it: the same calls, on
local files that are recorded. As Hadoop's local file system it syncs nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pyarrow as pa

from recovery.decide.start_batch import LogProgress, Verdict, decide_start
from recovery.local.workspace import Workspace
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from statebackend.spark.start.location_rewind import LocationRewind
from statebackend.state.blocks import BlockFile
from tests.crash.disk import Image, write_image
from tests.crash.recorder import Recorder
from tests.recovery.driver import new_id

__all__ = ["check_rewind", "check_spill", "recorded_rewind", "recorded_spill"]

BATCH = 3  # Spark has committed it, and the log ends before it


class _HadoopFiles:
    """What `CheckpointLocation` asks of a Hadoop file system."""

    def exists(self, path: Path) -> bool:
        return path.exists()

    def open(self, path: Path) -> Any:
        return path.open("rb")

    def listStatus(self, path: Path) -> list[Any]:
        found = [SimpleNamespace(getName=lambda name=name: name) for name in os.listdir(path)]
        return [SimpleNamespace(getPath=lambda one=one: one) for one in found]

    def rename(self, source: Path, target: Path) -> bool:
        try:
            os.rename(source, target)
        except FileNotFoundError:
            return False
        return True

    def delete(self, path: Path, recursive: bool) -> bool:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        return True


class _Location(CheckpointLocation):
    def stamp_ms(self, name: str) -> int | None:
        return None  # the plans here have none


class _HadoopPath(type(Path())):  # type: ignore[misc]
    def getFileSystem(self, configuration: object) -> _HadoopFiles:
        return _HadoopFiles()


def _location(root: Path) -> CheckpointLocation:
    jvm = MagicMock()
    jvm.org.apache.hadoop.fs.Path = _HadoopPath
    jvm.org.apache.commons.io.IOUtils.toString = lambda stream, encoding: stream.read().decode()
    spark: Any = SimpleNamespace(_jvm=jvm, _jsc=MagicMock())
    return _Location(spark, str(root / "location"))


def _start(location: CheckpointLocation, epochs: dict[str, int]) -> int:
    """What a start does; the batch that Spark runs next."""
    log = LogProgress(job="clicks", uri="file:///", query_id="q", last_epochs=epochs)
    going = LocationRewind(location, generation=1, look=list, new_id=new_id)
    going.repair({})
    progress = location.progress()
    decision = decide_start(progress, log)
    if decision.verdict is not Verdict.START:
        going.back_to(decision.batch, progress.last_commit, {})
    return decision.batch


def recorded_rewind(root: Path) -> tuple[Recorder, int]:
    """A query that goes back by a batch; and how many operations set the scene, synced."""
    recorder = Recorder(root, lambda kind, path: "rewind")
    with recorder:
        for folder in ("", "/offsets", "/commits"):
            os.mkdir(f"{root}/location{folder}")
        (root / "location" / "metadata").write_text(json.dumps({"id": "q"}))
        for folder, last in (("offsets", BATCH + 1), ("commits", BATCH)):
            for batch in range(last + 1):
                (root / "location" / folder / str(batch)).write_text(f"{folder} {batch}")
        for path in [root, *root.rglob("*")]:
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
        first = len(recorder.ops)
        assert _start(_location(root), {"op": BATCH - 1}) == BATCH
    return recorder, first


def check_rewind(image: Image, root: Path, operations: int) -> None:
    """Whatever is left of it, the next start makes Spark repeat exactly that batch."""
    write_image(image, root)
    location = _location(root)
    assert _start(location, {"op": BATCH - 1}) == BATCH
    found = location.progress()
    # Spark repeats the last batch that it planned, if it is the one after the last committed.
    assert (found.last_offset, found.last_commit) == (BATCH, BATCH - 1)
    assert (root / "location" / "offsets" / str(BATCH)).read_text() == f"offsets {BATCH}"
    assert not location.taken_back()


SCHEMA = pa.schema([pa.field("value", pa.int64())])


def recorded_spill(root: Path) -> tuple[Recorder, int]:
    """A process that sweeps what another left, spills into two files, and removes one."""
    recorder = Recorder(root, lambda kind, path: "spill")
    with recorder:
        for _ in range(2):
            work = Workspace(str(root / "h"), new_id)
            kept = work.path()
            kept.mkdir()
            blocks = [BlockFile(kept / "0", SCHEMA), BlockFile(work.path(), SCHEMA)]
            for block in blocks:
                for number in range(3):
                    column = pa.array(range(number, number + 100), pa.int64())
                    block.append(pa.RecordBatch.from_arrays([column], schema=SCHEMA))
            blocks[1].remove()
            os.close(work._lease)  # the process was killed
    return recorder, 0


def check_spill(image: Image, root: Path, operations: int) -> None:
    """The next process takes nothing of it, and removes it."""
    write_image(image, root)
    work = Workspace(str(root / "h"), new_id)
    own = work.path().parent
    left = {path.name for path in own.parent.iterdir()} - {own.name}
    os.close(work._lease)
    assert not left, f"left: {sorted(left)}"
