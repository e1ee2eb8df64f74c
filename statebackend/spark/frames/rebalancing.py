"""Spreading the subtasks of a running query over the executors that are there now.

Spark runs a subtask where the anchor's block for it is cached. So a subtask moves when its block is
dropped and made again elsewhere; the next batch looks up where that is.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Collection
from typing import Any, Final, Protocol

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from snapshot.log.progress_book import ProgressBook
from snapshot.log.progress_events import RebalanceProgress
from statebackend import system
from statebackend.spark.frames.anchor import Anchor
from statebackend.spark.frames.rebalance_plan import PlacementWatch, surplus

__all__ = ["LOOK_EVERY_S", "Places", "Rebalancer", "SparkPlaces"]

_log = logging.getLogger("statebackend.spark")
LOOK_EVERY_S: Final = 3.0
_ROUNDS: Final = 10
_ROUND_S: Final = 1.0
_DROPPED_WITHIN_S: Final = 5.0
_POLL_S: Final = 0.1
_MANAGER: Final = re.compile(r"BlockManagerId\(([^,]+),")


class Places(Protocol):
    """Where subtasks are, and what moves them."""

    subtasks: int

    def executors(self) -> frozenset[str]:
        """The ids of those that are there; none in local mode."""

    def places(self) -> dict[int, str] | None:
        """The executor of each subtask that has one; None where Spark does not say."""

    def drop(self, subtasks: Collection[int]) -> None:
        """Have these nowhere (or all of them, where that is all that Spark allows)."""

    def fill(self) -> None:
        """Give those that are nowhere a place, by a job of Spark's."""


class SparkPlaces:
    """Those of an anchor."""

    def __init__(self, spark: SparkSession, anchor: Anchor) -> None:
        self._spark, self._frame = spark, anchor.frame
        self.subtasks = anchor.parallelism

    @property
    def _context(self) -> Any:
        context: Any = self._spark.sparkContext._jsc
        return context.sc()

    def executors(self) -> frozenset[str]:
        """See `Places`."""
        context = self._context
        if context.isLocal():
            return frozenset()
        return frozenset(str(context.getExecutorIds().mkString(" ")).split())

    def places(self) -> dict[int, str] | None:
        """See `Places`."""
        try:
            return self._located(range(self.subtasks))
        except (Py4JError, TypeError) as error:
            _log.info("Spark does not say where the anchor's blocks are: %s", _line(error))
            return None

    def drop(self, subtasks: Collection[int]) -> None:
        """See `Places`."""
        try:
            blocks, block_of = self._blocks()
            for subtask in subtasks:
                blocks.removeBlock(block_of(subtask))
            # It is done a little later; a task that reads a block keeps it until it ends.
            until_s = system.monotonic_s() + _DROPPED_WITHIN_S
            while self._located(subtasks) and system.monotonic_s() < until_s:
                system.sleep_s(_POLL_S)
        except (Py4JError, TypeError) as error:
            _log.info("all of the anchor is cached anew: %s", _line(error))
            self._frame.unpersist(True)
            self._frame.cache()

    def fill(self) -> None:
        """See `Places`."""
        self._frame.count()

    def _located(self, subtasks: Collection[int]) -> dict[int, str]:
        blocks, block_of = self._blocks()
        said = {s: str(blocks.getLocations(block_of(s)).mkString(" ")) for s in subtasks}
        matches = {subtask: _MANAGER.search(text) for subtask, text in said.items()}
        return {subtask: found[1] for subtask, found in matches.items() if found}

    def _blocks(self) -> tuple[Any, Callable[[int], Any]]:
        """Spark's book of blocks, and the name of a subtask's block in it."""
        session: Any = self._spark
        cached = session._jsparkSession.sharedState().cacheManager()
        found = cached.lookupCachedData(self._frame._jdf).get()
        rdd_id = found.cachedRepresentation().cacheBuilder().cachedColumnBuffers().id()
        name = session._jvm.org.apache.spark.storage.RDDBlockId
        # By way of the scheduler: to look at SparkEnv takes classes that PySpark has not.
        scheduler = self._context.dagScheduler()
        field = scheduler.getClass().getDeclaredField("blockManagerMaster")
        field.setAccessible(True)
        return field.get(scheduler), lambda subtask: name(rdd_id, subtask)


class Rebalancer:
    """Places the subtasks of one backend anew, by hand or when executors came and stayed.

    Args:
        places: of its anchor; None while there is none.
        automatic: whether a running query is watched. settle_s: see `PlacementWatch`.
    """

    def __init__(
        self,
        places: Callable[[], Places | None],
        *,
        job: str,
        automatic: bool,
        settle_s: float,
        now_s: Callable[[], float] = system.monotonic_s,
        sleep_s: Callable[[float], None] = system.sleep_s,
    ) -> None:
        self._places, self._job = places, job
        self._automatic, self._settle_s = automatic, settle_s
        self._now_s, self._sleep_s = now_s, sleep_s
        self._placing = threading.Lock()
        self._known: frozenset[str] | None = None  # over which subtasks were placed last

    def by_hand(self, book: ProgressBook | None, epoch: int | None) -> None:
        """Spread subtasks over the executors that are there now."""
        places = self._places()
        if places is None:
            return
        try:
            executors = places.executors()
        except Py4JError as error:
            _log.info("all subtasks are placed anew, Spark names no executors: %s", _line(error))
            places.drop(range(places.subtasks))
            places.fill()
            return
        self._place(places, executors, "by hand", book, epoch)

    def watch(
        self, active: Callable[[], bool], book: ProgressBook, epoch: Callable[[], int | None]
    ) -> threading.Thread | None:
        """Look after a query's executors in a thread that ends with it.

        Args:
            active: whether the query runs. book: is told. epoch: the one that runs.
        """
        places = self._places()
        if not self._automatic or places is None:
            return None
        thread = threading.Thread(
            target=self._follow, args=(active, book, epoch), name="statebackend-places", daemon=True
        )
        try:
            if not places.executors():
                return None  # local mode, where nobody comes or goes
        except Py4JError as error:
            _log.info("executors are not watched: %s", _line(error))
            return None
        thread.start()
        return thread

    def _follow(
        self, active: Callable[[], bool], book: ProgressBook, epoch: Callable[[], int | None]
    ) -> None:
        try:
            self._look_after(active, book, epoch)
        except Exception as error:
            # The session has ended, most likely; the query does not depend on this.
            _log.info("executors are not watched any more: %s", _line(error))

    def _look_after(
        self, active: Callable[[], bool], book: ProgressBook, epoch: Callable[[], int | None]
    ) -> None:
        places = self._places()
        if places is None:
            return
        self._known = frozenset((places.places() or {}).values()) or places.executors()
        watch = PlacementWatch(placed=self._known, settle_s=self._settle_s)
        while active():
            self._sleep_s(LOOK_EVERY_S)
            places = self._places()
            if places is None or not active():
                return
            executors = places.executors()
            watch = watch.seen(executors, self._now_s())
            if watch.due(self._now_s()):
                done = True
                try:
                    done = self._place(places, executors, "automatic", book, epoch())
                except Exception as error:
                    if not active():
                        return
                    done = False
                    _log.warning(
                        "job %s: subtasks could not be placed anew, the query goes on as it is: %s",
                        self._job,
                        _line(error),
                    )
                watch = watch.tried(executors, self._now_s(), done=done)

    def _place(
        self,
        places: Places,
        executors: frozenset[str],
        reason: str,
        book: ProgressBook | None,
        epoch: int | None,
    ) -> bool:
        """Whether all executors have their share now."""
        if not executors:
            _log.info("job %s: there is no executor to place subtasks on", self._job)
            return False
        with self._placing:
            started_s = self._now_s()
            before = places.places()
            known = self._known or executors
            # What is nowhere finds a place with the next batch; a newcomer must not miss it.
            fills = reason != "automatic" or not executors <= known
            moved = self._spread(places, executors, before, fills=fills)
            after = places.places()
            even = not surplus(after or {}, executors, places.subtasks)
            if not moved and reason == "automatic":
                return even
            self._known = executors
            event = RebalanceProgress(
                job=self._job,
                epoch=epoch,
                reason=reason,
                joined=sorted(executors - known),
                left=sorted(known - executors),
                executors_before=_counted(before, executors),
                executors_after=_counted(after, executors),
                subtasks_moved=moved,
                seconds=round(self._now_s() - started_s, 3),
            )
        _log.info("job %s: subtasks were placed anew (%s)", self._job, reason)
        if book is not None:
            book.rebalanced(event)
        return even

    def _spread(
        self,
        places: Places,
        executors: frozenset[str],
        before: dict[int, str] | None,
        *,
        fills: bool,
    ) -> int:
        """Move what must be moved, with ``fills`` place what is nowhere; how many subtasks were."""
        if before is None:
            places.drop(range(places.subtasks))
            places.fill()
            return places.subtasks
        now = before
        for number in range(_ROUNDS):
            leaving = surplus(now, executors, places.subtasks)
            nowhere = places.subtasks - len(now) if fills else 0
            if len(leaving) + nowhere == 0:
                break
            # A batch that runs meanwhile may make a block again where it was, the more so while a
            # new executor is slow with its first tasks.
            if number:
                self._sleep_s(_ROUND_S)
            places.drop(leaving)
            places.fill()
            now = places.places() or {}
        return sum(now.get(subtask) != before.get(subtask) for subtask in range(places.subtasks))


def _counted(places: dict[int, str] | None, executors: Collection[str]) -> dict[str, int]:
    if places is None:
        return {}
    at = list(places.values())
    return {executor: at.count(executor) for executor in sorted({*at, *executors})}


def _line(error: BaseException) -> str:
    return (str(error).partition("\n")[0] or type(error).__name__)[:200]
