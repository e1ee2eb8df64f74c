"""Flink as a side of `python -m bench aggregate` and `continuous`: small Java jobs, compiled here.

Its jars come from the package ``apache-flink-libraries`` (330 MB), which is installed into a folder
of its own when it is not there yet. Without a Java compiler, or without that folder, this side is
left out, with the reason in the results.

What Flink is given: a ``KeyedProcessFunction`` with a ``ValueState`` (`FlinkCount.java`), its
embedded RocksDB with incremental checkpoints every 2 s into a local folder, object reuse, 1 GB of
managed memory, 4 GB of heap as Spark's driver has, and the same keys in the same order out of a
file that is mapped into memory. The job of `continuous` is the same, but for its rows, which are
made as they are due (`FlinkContinuous.java`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import busy_share
from bench.runner import SideFailed
from bench.works import Shape, Work

__all__ = ["OPENED", "VERSION", "Flink"]

VERSION = "2.3.0"
_PACKAGE = f"apache-flink-libraries=={VERSION}"
_SOURCES = Path(__file__).parent
_TIMEOUT_S = 1800.0
_LOG_CHARACTERS = 4000
# What Flink's own launcher opens for it on Java 17.
OPENED = (
    "java.base/java.lang",
    "java.base/java.net",
    "java.base/java.io",
    "java.base/java.nio",
    "java.base/sun.nio.ch",
    "java.base/java.lang.reflect",
    "java.base/java.text",
    "java.base/java.time",
    "java.base/java.util",
    "java.base/java.util.concurrent",
    "java.base/java.util.concurrent.atomic",
    "java.base/java.util.concurrent.locks",
)


class Flink:
    """A compiled job.

    Args:
        folder: that holds the jars, or is to hold them; None leaves Flink out.
        work: for classes, input and state.
        job: the class that is the job, and its file's name.
    """

    def __init__(self, folder: str | None, work: Path, job: str = "FlinkCount") -> None:
        self._work, self._job = work, job
        self._keys: dict[Path, dict[str, int]] = {}
        self.skipped = self._prepare(Path(folder).resolve() if folder else None)

    def _prepare(self, folder: Path | None) -> str:
        """Install and compile; why that cannot be, or nothing."""
        if folder is None:
            return "no folder with Flink's jars was given (--flink FOLDER)"
        for tool in ("java", "javac"):
            if shutil.which(tool) is None:
                return f"there is no {tool}"
        self._jars = folder / "pyflink" / "lib"
        if not any(self._jars.glob("flink-dist-*.jar")):
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            code, said = _run([*command, "--target", str(folder), _PACKAGE])
            if code:
                return f"{_PACKAGE} could not be installed: {said[-300:]}"
        self._classes = self._work / "classes"
        self._classes.mkdir(parents=True)
        command = ["javac", "-nowarn", "-cp", f"{self._jars}/*", "-d", str(self._classes)]
        code, said = _run([*command, str(_SOURCES / f"{self._job}.java")])
        return f"the job does not compile: {said[-300:]}" if code else ""

    def run(self, work: Work, shape: Shape, partitions: int) -> dict[str, Any]:
        """All batches of ``work`` as one stream; its rows per second after those of the warm-up.

        Raises:
            SideFailed: it failed, or what it said is wrong.
        """
        path, wanted = self._input(work, shape)
        rows, warm = shape.full * shape.rows, shape.warm * shape.rows
        busy = busy_share()
        found = self.execute([str(path), rows, warm, partitions], wanted)
        counted_s = found["counted_s"]
        return {
            "rows_per_s": round((rows - warm) / counted_s, 1),
            "total_s": counted_s,
            "busy_before": busy,
        }

    def execute(self, arguments: Sequence[Any], wanted: Mapping[str, int]) -> dict[str, Any]:
        """Run the job once; what it said.

        Args:
            arguments: of the job, before its folder and its result's place.
            wanted: what must be in what it said.

        Raises:
            SideFailed: it failed, or what it said is wrong.
        """
        folder = self._work / "run"
        folder.mkdir()
        result = folder / "result.json"
        opened = [f"--add-opens={package}=ALL-UNNAMED" for package in OPENED]
        java = ["java", "-Xmx4g", f"-Djava.io.tmpdir={folder}", *opened]
        java += ["-cp", f"{self._classes}:{self._jars}/*", self._job]
        code, said = _run([*java, *map(str, arguments), str(folder), str(result)])
        if code or not result.exists():
            raise SideFailed(f"Flink ended with {code}:\n{said[-_LOG_CHARACTERS:]}")
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        shutil.rmtree(folder)
        if wrong := {name: found[name] for name in wanted if found[name] != wanted[name]}:
            raise SideFailed(f"Flink said {wrong}, not {dict(wanted)}")
        return found

    def _input(self, work: Work, shape: Shape) -> tuple[Path, dict[str, int]]:
        """The file of all keys, and what must come out: counts modulo 2**64, as Java adds."""
        path = self._work / f"{work.name}-{shape.keys}.keys"
        if path not in self._keys:
            with path.open("wb") as file:
                for keys, _, _ in work.make(shape):
                    file.write(keys.astype("<i8").tobytes())
            keys = np.fromfile(path, dtype="<i8")
            seen = np.bincount(keys, minlength=shape.keys)
            said = seen * (seen + 1) // 2
            weighted = int((np.arange(shape.keys) * said).sum())
            self._keys[path] = {"rows": len(keys), "total": int(said.sum()), "weighted": weighted}
        return path, self._keys[path]


def _run(command: list[str]) -> tuple[int, str]:
    """Its exit code and what it said."""
    env = {name: value for name, value in os.environ.items() if name != "CLASSPATH"}
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, text=True
    )
    try:
        said, _ = child.communicate(timeout=_TIMEOUT_S)
    except BaseException:
        child.kill()
        child.wait()
        raise
    return child.returncode, said
