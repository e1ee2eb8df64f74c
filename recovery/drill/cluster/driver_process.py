"""The drivers of a drill: processes that are started, watched, killed and written down."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from recovery.drill.cluster.live_processes import LiveProcesses, command_of, parent_of
from recovery.drill.cluster.polling import until
from recovery.drill.driver.driver_messages import DriverConfig, Event
from recovery.drill.report.drill_report import DriverLife, Recovery

__all__ = ["Driver"]

_GONE_WITHIN_S = 180.0
_REAPED_WITHIN_S = 30.0
_ERROR_CHARACTERS_MAX = 2000


class Driver:
    """One driver process, from its start to its end.

    Args:
        number: from 1.
        config: what it runs.
        environment: its variables.
        now_s: seconds since the drill began.
    """

    def __init__(
        self,
        number: int,
        config: DriverConfig,
        environment: Mapping[str, str],
        *,
        now_s: Callable[[], float],
    ) -> None:
        self.number = number
        self.started_s = now_s()
        self.ready_s: float | None = None
        self.ended_s: float | None = None
        self.ending: Literal["finished", "killed", "failed", "running"] = "running"
        self.error = ""
        self.idle_s: float | None = None  # since when it waits for input
        self.recoveries: list[Recovery] = []
        self.restarts = self.restarts_seen = 0  # of the job, in this driver
        self._now_s = now_s
        self._events = Path(config.events)
        self._read_bytes = 0
        self.log = self._events.with_suffix(".log")
        said = self._events.with_suffix(".told")
        config.write(said)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "recovery.drill.driver.driver_main", str(said)],
                stdin=subprocess.PIPE,  # its other end is here: the driver ends when we do
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=config.root,
                start_new_session=True,  # a Ctrl-C is for the drill, which ends its drivers
            )

    @property
    def running(self) -> bool:
        """Whether its end has not been seen yet."""
        return self.ended_s is None

    @property
    def life(self) -> DriverLife:
        """As the report has it."""
        return DriverLife(
            number=self.number,
            started_s=self.started_s,
            ready_s=self.ready_s,
            ended_s=self.ended_s,
            ending=self.ending,
            error=self.error,
            restarts=self.restarts,
        )

    @property
    def pid(self) -> int:
        """Of the Python process."""
        return self._process.pid

    def look(self) -> None:
        """Take in what is new: events, and its end."""
        code = self._process.poll()  # before the events: an ended one writes no more
        self._take_events()
        if code is None or self.ended_s is not None:
            return
        self.ended_s = self._now_s()
        if self.ending == "running":
            self.ending = "finished" if code == 0 else "failed"
        if self.ending == "failed" and not self.error:
            self.error = f"The driver ended with {code}. The end of its log: {self._log_tail()}"
        if self._process.stdin is not None:
            self._process.stdin.close()

    def condemn(self) -> None:
        """From now on its end is the drill's doing."""
        if self.running:
            self.ending = "killed"

    def reap(self) -> None:
        """Wait for its end, which somebody has brought about. Raises `TimeoutExpired`."""
        self._process.wait(timeout=_REAPED_WITHIN_S)
        self.look()

    def kill(self, processes: LiveProcesses) -> None:
        """SIGKILL to it and its JVM; returns when both are gone."""
        jvms = [pid for pid in processes.driver_jvms() if self._is_mine(pid)]
        self.condemn()
        processes.kill([self.pid, *jvms])
        self._process.wait(timeout=_GONE_WITHIN_S)
        until(
            lambda: not [pid for pid in jvms if "SparkSubmit" in command_of(pid)],
            "the end of a driver's JVM",
            _GONE_WITHIN_S,
        )
        self.look()

    def _is_mine(self, pid: int) -> bool:
        while pid > 1:
            if pid == self.pid:
                return True
            pid = parent_of(pid)
        return False

    def _take_events(self) -> None:
        try:
            with self._events.open("rb") as file:
                file.seek(self._read_bytes)
                new = file.read()
        except FileNotFoundError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            self._take(msgspec.json.decode(line, type=Event))

    def _take(self, event: Event) -> None:
        if event.kind == "ready":
            self.ready_s = self._now_s()
        elif event.kind == "restore" and event.restore is not None:
            self.recoveries.append(
                Recovery(at_s=self._now_s(), driver=self.number, report=event.restore)
            )
        elif event.kind == "restarted":
            self.restarts += 1
        elif event.kind in ("idle", "busy"):
            self.idle_s = self._now_s() if event.kind == "idle" else None
        elif event.kind == "failed":
            self.error = event.error[:_ERROR_CHARACTERS_MAX]

    def _log_tail(self) -> str:
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _ERROR_CHARACTERS_MAX))
            return file.read().decode(errors="replace")
