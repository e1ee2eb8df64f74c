"""The sides of `python -m bench kafka`: what each is made of, and the processes that it is.

Jars come from Maven Central, Quix Streams from PyPI, once; they are kept where the tests keep
theirs (see `tests.support.maven`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from bench.cpu import used_s
from bench.flink import OPENED
from bench.machine import ROOT
from bench.runner import SideFailed, session_of
from tests.support.kafka import connector_jars
from tests.support.maven import jars_folder, jars_of

__all__ = ["Running", "Tools", "module_command", "task_file"]

# No connector was published for Flink 2.3, nor one for Spark 4.3, by 2026-11-27.
_FLINK = "2.2.1"
_FLINK_JARS = (
    "org.apache.flink:flink-connector-kafka:5.0.0-2.2",
    f"org.apache.flink:flink-clients:{_FLINK}",
    f"org.apache.flink:flink-connector-base:{_FLINK}",
    f"org.apache.flink:flink-statebackend-rocksdb:{_FLINK}",
)
_QUIX = "quixstreams==3.28.1"
_LOG_CHARACTERS = 3000
_STOP_S = 20.0
_BUFFERS_MS = {"rate": "10 ms", "most": "100 ms"}  # Flink's default is 100 ms; ours is 10 ms
_STATE = "spark.sql.streaming.stateStore"


@dataclass
class Tools:
    """What sides are started with; made when a side is first asked for.

    Attributes:
        versions: by side, of what it is made of.
    """

    work: Path
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    _flink: str = ""
    _quix: str = ""
    _spark: str = ""

    def commands(self, side: str, task: dict[str, Any], kind: str) -> list[list[str]]:
        """The processes of a side; its task is written into ``task["work"]``.

        Args:
            kind: ``rate`` or ``most``.

        Raises:
            SideFailed: it cannot be made here.
        """
        folder = Path(task["work"])
        if side == "flink":
            guarantee = "EXACTLY_ONCE" if task["exactly_once"] else "AT_LEAST_ONCE"
            words = [task["servers"], task["source"], task["target"], task["partitions"]]
            words += [round(task["checkpoint_s"] * 1000), guarantee, _BUFFERS_MS[kind], folder]
            opened = [f"--add-opens={package}=ALL-UNNAMED" for package in OPENED]
            java = ["java", "-Xmx4g", f"-Djava.io.tmpdir={folder}", *opened, "-cp", self.flink()]
            return [[*java, "FlinkKafka", *map(str, words)]]
        if side == "quix":
            script = str(Path(__file__).with_name("quix_side.py"))
            numbers = range(task["partitions"])
            paths = [task_file(task | {"number": n}, folder / f"task-{n}.json") for n in numbers]
            return [[self.quix(), script, str(path)] for path in paths]
        if side == "ours":
            self._note(side, statebackend=_commit(), **_of("pyspark", "confluent-kafka"))
            return [module_command("ours_side", task_file(task, folder / "task.json"))]
        conf = {"spark.jars": self.spark(side)}
        if side == "spark-realtime":  # a slot for each task of both stages
            conf |= {
                "spark.master": f"local[{2 * task['partitions']}]",
                f"{_STATE}.checkpointFormatVersion": "2",
            }
        return [
            module_command("spark_side", task_file(task | {"conf": conf}, folder / "task.json"))
        ]

    def _note(self, side: str, **found: str) -> None:
        self.versions[side] = {name.replace("_", "-"): of for name, of in found.items()}

    def spark(self, side: str) -> str:
        """The connector's jars."""
        jars = connector_jars()
        self._note(side, **_of("pyspark"), **_versions(jars, "spark-sql-kafka", "kafka-clients"))
        return ",".join(map(str, jars))

    def flink(self) -> str:
        """The class path, with the job in it."""
        if not self._flink:
            jars = [jar for artifact in _FLINK_JARS for jar in jars_of(artifact)]
            found = _versions(jars, "flink-connector-kafka", "flink-runtime", "kafka-clients")
            self._note("flink", **found)
            classes = self.work / "flink-classes"
            classes.mkdir()
            path = ":".join(map(str, jars))
            source = str(Path(__file__).parents[1] / "FlinkKafka.java")
            command = ["javac", "-nowarn", "-cp", path, "-d", str(classes), source]
            _done(command)
            self._flink = f"{classes}:{path}"
        return self._flink

    def quix(self) -> str:
        """A Python that has it."""
        if not self._quix:
            home = jars_folder() / _QUIX.replace("==", "-")
            if not (home / "done").exists():
                shutil.rmtree(home, ignore_errors=True)
                _done([sys.executable, "-m", "venv", str(home)])
                _done([str(home / "bin" / "python"), "-m", "pip", "install", "-q", _QUIX])
                (home / "done").touch()
            self._quix = str(home / "bin" / "python")
            code = "import confluent_kafka as c; print(c.__version__)"
            self._note(
                "quix",
                quixstreams=_QUIX.partition("==")[2],
                confluent_kafka=_done([self._quix, "-c", code]).strip(),
            )
        return self._quix


class Running:
    """The processes of something that was started."""

    _started: ClassVar[list[Running]] = []

    def __init__(self, commands: Sequence[Sequence[str]], folder: Path, name: str) -> None:
        self._log, self._name = folder / f"{name}.log", name
        self._started.append(self)
        with self._log.open("ab") as output:
            self._children = [
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for command in commands
            ]

    def check(self) -> None:
        """Raises `SideFailed` if it has ended."""
        for child in self._children:
            if child.poll() is not None:
                raise SideFailed(f"{self._name} ended with {child.returncode}:\n{self.said()}")

    def ended(self) -> bool:
        """Whether all of it came to an end, and to a good one.

        Raises:
            SideFailed: to a bad one.
        """
        codes = [child.poll() for child in self._children]
        if any(codes):
            raise SideFailed(f"{self._name} ended with {codes}:\n{self.said()}")
        return None not in codes

    def said(self) -> str:
        """The end of its log."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARACTERS:]

    @property
    def pids(self) -> list[int]:
        """Its processes, and those that they have started."""
        return [pid for child in self._children for pid in session_of(child.pid)]

    def cpu_s(self) -> float:
        """What its processes have used of the processor so far."""
        used = 0.0
        for pid in self.pids:
            with contextlib.suppress(OSError):
                used += used_s(pid)
        return used

    def python_pids(self) -> list[int]:
        """Those of its processes that run Python, the busiest first."""
        found = []
        for pid in self.pids:
            with contextlib.suppress(OSError):
                if "python" in Path(f"/proc/{pid}/exe").readlink().name:
                    found.append((used_s(pid), pid))
        return [pid for _, pid in sorted(found, reverse=True)]

    def stop(self) -> None:
        """End it and what it has started."""
        for child in self._children:
            for pid in session_of(child.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            child.wait(_STOP_S)
        until_s = time.monotonic() + _STOP_S
        while self.pids:
            if time.monotonic() > until_s:
                raise SideFailed(f"{self._name} does not end")
            time.sleep(0.1)
        if self in self._started:
            self._started.remove(self)

    @classmethod
    def stop_all(cls) -> None:
        """End what still runs, as after an interrupt in the midst of a stop."""
        for one in list(cls._started):
            one.stop()


def module_command(name: str, task: Path) -> list[str]:
    return [sys.executable, "-m", f"bench.kafka.{name}", str(task)]


def task_file(task: dict[str, Any], path: Path) -> Path:
    path.write_text(json.dumps(task), encoding="utf-8")
    return path


def _done(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SideFailed(f"{' '.join(command)[:300]} failed: {(done.stdout + done.stderr)[-1000:]}")
    return done.stdout


def _of(*packages: str) -> dict[str, str]:
    return {name: version(name) for name in packages}


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    return _done(command).strip()


def _versions(jars: Sequence[Path], *names: str) -> dict[str, str]:
    found = {}
    for name in names:
        for jar in jars:
            if match := re.fullmatch(rf"{name}[\w.]*?-(?:0-10_2\.13-)?(\d[\w.-]*)\.jar", jar.name):
                found[name] = match[1]
    return found
