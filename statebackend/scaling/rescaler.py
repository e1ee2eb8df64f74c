"""A query that is stopped, rescaled and started again by itself, as a policy has it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from pyspark.sql.streaming.query import StreamingQuery

from snapshot.log.progress_book import tell
from snapshot.log.progress_events import RescaleProgress
from statebackend import system
from statebackend.backend import StateBackend
from statebackend.errors import FencedError, RescaleError, SettingError
from statebackend.scaling.measured_query import SparkQuery, Watched
from statebackend.scaling.rescale_policy import Load, RescalePolicy, Suggestion, suggest

__all__ = ["Rescaler"]

_log = logging.getLogger("statebackend.spark")
_POLL_S: Final = 0.2
_STARTS_TRIED: Final = 3
_BETWEEN_STARTS_S: Final = 5.0


class Rescaler:
    """Runs a query, and restarts it at another parallelism when its load asks for that.

    Args:
        build: makes a query at a parallelism and starts it: a new `StateBackend` with that
            ``parallelism=``, its frames, ``backend.write_stream(...)``; gives both back. It is
            called again for each change.
        parallelism: of the first start.
        policy: when there is another, and which.
        look_every_s: how often the load is looked at.
        confirm_s: a start counts as good when its first batch is done, or none has come in so long.
        failures_max: it is given up after so many failed changes, one after the other.
        now_s: a clock; for tests.
        sleep_s: waits; for tests.
        watch: makes what is looked at of what ``build`` gives; for tests without Spark.

    A change is an ordinary stop and start: the query stops between two batches, what it has done is
    durable, and the next one goes on there. Where the new start fails, it goes on at the old
    parallelism.
    """

    def __init__(
        self,
        build: Callable[[int], tuple[StateBackend, StreamingQuery]],
        *,
        parallelism: int,
        policy: RescalePolicy | None = None,
        look_every_s: float = 5.0,
        confirm_s: float = 60.0,
        failures_max: int = 3,
        now_s: Callable[[], float] = system.monotonic_s,
        sleep_s: Callable[[float], None] = system.sleep_s,
        watch: Callable[[Any], Watched] | None = None,
    ) -> None:
        if look_every_s <= 0 or failures_max < 1 or parallelism < 1:
            raise SettingError(
                "A Rescaler was given a time, a number of failures or a parallelism below its "
                "least.",
                todo="Give a positive look_every_s, failures_max and parallelism.",
            )
        self.policy = policy or RescalePolicy()
        self._build, self._first = build, parallelism
        self._look_every_s, self._confirm_s = look_every_s, confirm_s
        self._failures_max = failures_max
        self._now_s, self._sleep_s = now_s, sleep_s
        self._watch = watch or self._of_spark
        self._running: Watched | None = None
        self._started: tuple[StateBackend, StreamingQuery] | None = None
        self._changed_s = float("-inf")
        self._loads: list[Load] = []
        self._failures = 0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.rescales: list[RescaleProgress] = []
        """What was changed so far, and what could not be."""
        self.failure: BaseException | None = None
        """What ended the watching in its thread; None while all is well."""

    @property
    def backend(self) -> StateBackend | None:
        """That of the newest start."""
        return self._started[0] if self._started else None

    @property
    def query(self) -> StreamingQuery | None:
        """The newest start's."""
        return self._started[1] if self._started else None

    @property
    def parallelism(self) -> int:
        """What the query runs at."""
        return self._running.parallelism if self._running else self._first

    # --- running -------------------------------------------------------------------------------

    def run(self) -> None:
        """Start the query and look after it until it ends, or `stop` is called.

        Raises:
            RescaleError: changes failed again and again (the query runs on, at the old
                parallelism), or it could not be started any more.
            Exception: what the query, or its first start, failed with.
        """
        self._begin_first()
        self._look_after()

    def start(self) -> None:
        """As `run`, in a thread: returns when the query is started.

        Raises:
            Exception: what its start failed with.
        """
        self._begin_first()

        def look_after() -> None:
            try:
                self._look_after()
            except BaseException as error:
                self.failure = error
                _log.error("the load is not looked at any more: %s", _line(error))

        self._thread = threading.Thread(target=look_after, name="statebackend-scaling", daemon=True)
        self._thread.start()

    def stop(self, *, query: bool = True) -> None:
        """End the watching, and the query with it, between two batches.

        Args:
            query: whether to stop the query too.

        Raises:
            StateBackendError: what the query has done is not durable.
        """
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if query and self._running is not None and self._running.active():
            self._running.stop()

    def _begin_first(self) -> None:
        if self._running is not None:
            raise SettingError("This Rescaler was started before.", todo="Make a new one.")
        self._take(self._build(self._first), self._first)

    def _look_after(self) -> None:
        while not self._stopping.is_set():
            self._sleep_s(self._look_every_s)
            running = self._running
            assert running is not None
            if not running.active():
                error = running.error()
                if error is not None:
                    raise error
                return
            now_s = self._now_s()
            self._loads += running.measure(now_s)
            self._forget(now_s)
            wanted = suggest(
                self._loads,
                policy=self.policy,
                parallelism=running.parallelism,
                max_parallelism=running.max_parallelism,
                now_s=now_s,
                changed_s=self._changed_s,
                cores=running.cores(),
            )
            if wanted is not None and not self._stopping.is_set():
                self._rescale(running, wanted)

    def _forget(self, now_s: float) -> None:
        recent = sum(load.at_s >= now_s - self.policy.window_s for load in self._loads)
        del self._loads[: -max(recent, self.policy.min_samples)]

    # --- one change ----------------------------------------------------------------------------

    def _rescale(self, old: Watched, wanted: Suggestion) -> None:
        before, began_s = old.parallelism, self._now_s()
        _log.info("job %s: to parallelism %d: %s", old.job, wanted.parallelism, wanted.reason)
        failed: Exception | None = None
        try:
            old.stop()
            self._take(self._build(wanted.parallelism), wanted.parallelism)
            stood_s = self._now_s()
            self._confirm()
        except Exception as error:
            if _is_fenced(error):
                raise  # another driver has the job: it is not for us to take it back
            failed = error
            self._back_to(before, error)
            self._loads, self._changed_s = [], self._now_s()  # not at once again
            stood_s = self._now_s()
        event = RescaleProgress(
            job=old.job,
            from_parallelism=before,
            to_parallelism=wanted.parallelism,
            reason=wanted.reason,
            seconds=round(stood_s - began_s, 3),
            failure=_line(failed) if failed is not None else "",
        )
        self.rescales.append(event)
        tell(event)
        self._failures = 0 if failed is None else self._failures + 1
        if failed is not None and self._failures >= self._failures_max:
            raise RescaleError(
                f"Job {old.job!r} could not be started at parallelism {wanted.parallelism}, after "
                f"{self._failures} failed changes in a row; it runs at {before}. The last error: "
                f"{_line(failed)}",
                todo="See what that error says; then make a new Rescaler.",
            ) from failed

    def _confirm(self) -> None:
        """Until the first batch at a new parallelism is done, or it is clear that none comes."""
        running, until_s = self._running, self._now_s() + self._confirm_s
        assert running is not None
        while self._now_s() < until_s and not running.has_run():
            if not running.active():
                error = running.error()
                if error is not None:
                    raise error
                return
            self._sleep_s(_POLL_S)

    def _back_to(self, parallelism: int, cause: Exception) -> None:
        """Have the query run as it did."""
        running = self._running
        if running is not None and running.active():
            if running.parallelism == parallelism:
                return  # it could not be stopped
            running.stop()
        for tried in range(_STARTS_TRIED):
            if tried:
                self._sleep_s(_BETWEEN_STARTS_S)
            try:
                self._take(self._build(parallelism), parallelism)
            except Exception as error:
                if _is_fenced(error):
                    raise
                _log.warning("parallelism %d could not be gone back to: %s", parallelism, error)
                last: Exception = error
            else:
                return
        raise RescaleError(
            f"The query was stopped to be rescaled, and could be started neither at another "
            f"parallelism ({_line(cause)}) nor at the old one, {parallelism} ({_line(last)}).",
            todo="See what these errors say, and start it again: its state is as it was.",
        ) from last

    def _take(self, started: tuple[StateBackend, StreamingQuery], parallelism: int) -> None:
        self._started = started
        self._running = running = self._watch(started)
        self._loads, self._changed_s = [], self._now_s()
        if running.parallelism != parallelism:
            running.stop()
            raise SettingError(
                f"Asked for a query at parallelism {parallelism}, build() made one at "
                f"{running.parallelism}.",
                todo="Hand the number on: StateBackend(..., parallelism=parallelism).",
            )

    def _of_spark(self, started: tuple[StateBackend, StreamingQuery]) -> Watched:
        backend, query = started
        target_s = self.policy.batch_target_s
        return SparkQuery(
            backend, query, batch_target_s=target_s, now_s=self._now_s, sleep_s=self._sleep_s
        )


def _is_fenced(error: BaseException) -> bool:
    return isinstance(error, FencedError) or f"[{FencedError.code}]" in str(error)


def _line(error: BaseException) -> str:
    return (str(error).partition("\n")[0] or type(error).__name__)[:300]
