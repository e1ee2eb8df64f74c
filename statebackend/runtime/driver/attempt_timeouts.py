"""Has Spark kill attempts that take too long: a frozen worker does not fail, and its batch waits.

Spark's own `spark.sql.execution.pyspark.udf.killOnIdleTimeout` sends SIGTERM, which a stopped
process takes only when it goes on. So Spark is told to kill the attempt. The daemon that made the
worker then kills it (SIGKILL), and Spark runs the task again, also where tasks have one try only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import SparkSession

from statebackend import system

__all__ = ["Attempts", "Overdue", "watch_attempts"]

_log = logging.getLogger("statebackend.spark")
_LOOK_EVERY_S: Final = 5.0
_LOOKS: Final = 4  # in the time that an attempt has


@dataclass(frozen=True)
class Overdue:
    """An attempt that has not acked in its time."""

    operator: str
    subtask: int
    epoch: int
    attempt: int
    since_s: float


class Attempts:
    """The attempts of a run between their begin and their ack. Thread-safe.

    Args:
        timeout_s: how long one may take. After a kill the next attempt of the subtask in that epoch
        has twice as long, so that a task which is only slow gets to its end.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._running: dict[tuple[str, int, int], Overdue] = {}
        self._killed: dict[tuple[str, int], tuple[int, int]] = {}  # epoch, and how many in it
        self._lock = threading.Lock()

    def begun(self, operator: str, subtask: int, epoch: int, attempt: int, now_s: float) -> None:
        """An attempt was admitted, maybe beside another of its subtask. It may begin twice."""
        place = operator, subtask
        with self._lock:
            for key, one in list(self._running.items()):
                if key[:2] == place and one.epoch != epoch:
                    del self._running[key]  # Spark has gone on without it
            started = Overdue(operator, subtask, epoch, attempt, now_s)
            self._running.setdefault((operator, subtask, attempt), started)
            if self._killed.get(place, (epoch, 0))[0] != epoch:
                del self._killed[place]

    def over(self, operator: str, subtask: int, attempt: int) -> None:
        """It came to its ack, from where on it waits for the driver; or it has ended."""
        with self._lock:
            self._running.pop((operator, subtask, attempt), None)

    def overdue(self, now_s: float) -> list[Overdue]:
        """Those that have had their time, until they are over or killed."""
        with self._lock:
            found = []
            for key, one in self._running.items():
                _, times = self._killed.get(key[:2], (one.epoch, 0))
                if now_s - one.since_s >= self.timeout_s * 2**times:
                    found.append(one)
            return found

    def killed(self, one: Overdue) -> None:
        """It was killed: the next of its subtask has more time."""
        place = one.operator, one.subtask
        self.over(*place, one.attempt)
        with self._lock:
            _, times = self._killed.get(place, (one.epoch, 0))
            self._killed[place] = one.epoch, times + 1


def watch_attempts(
    spark: SparkSession, attempts: Attempts, active: Callable[[], bool]
) -> threading.Thread:
    """Have Spark kill and repeat what is overdue, in a thread, as long as the query is active."""
    context: Any = spark.sparkContext._jsc.sc()
    thread = threading.Thread(
        target=_watch,
        args=(attempts, active, lambda attempt, why: context.killTaskAttempt(attempt, True, why)),
        name="statebackend-attempts",
        daemon=True,
    )
    thread.start()
    return thread


def _watch(
    attempts: Attempts, active: Callable[[], bool], kill: Callable[[int, str], object]
) -> None:
    every_s = min(_LOOK_EVERY_S, attempts.timeout_s / _LOOKS)
    while _is_active(active):
        try:
            look(attempts, kill, system.monotonic_s())
        except Exception:
            _log.exception("a look for attempts that take too long failed")
        system.sleep_s(every_s)


def _is_active(active: Callable[[], bool]) -> bool:
    try:
        return active()
    except Exception as error:  # Spark has ended
        _log.debug("attempts are not watched any more (%s)", error)
        return False


def look(attempts: Attempts, kill: Callable[[int, str], object], now_s: float) -> None:
    """Kill what is overdue now.

    Args:
        kill: kills a task attempt, given a reason; False if it was not running any more.
    """
    for one in attempts.overdue(now_s):
        try:
            if not kill(one.attempt, "no ack within spark.statebackend.attemptTimeoutSeconds"):
                attempts.over(one.operator, one.subtask, one.attempt)
                continue
        except Exception as error:  # the next look tries again; the others are killed now
            _log.warning("task attempt %d could not be killed (%s)", one.attempt, error)
            continue
        attempts.killed(one)
        _log.warning(
            "subtask %d of %r has not come to the end of epoch %d in %.0f s: its task attempt %d "
            "is killed, and Spark runs it again",
            one.subtask,
            one.operator,
            one.epoch,
            now_s - one.since_s,
            one.attempt,
        )
