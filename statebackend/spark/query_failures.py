"""Tells why a query failed in one error of ours: by the query that a start returns, Spark's own.

Spark's text of a failed query has the error in the middle: behind what the JVM says of it, and
before the stack of the task and the query's whole plan.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from pyspark import SparkContext
from pyspark.errors import StreamingQueryException
from pyspark.errors.exceptions import captured
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from statebackend.errors import EnvironmentMissingError, StateBackendError, error_for_code
from statebackend.system import SYSTEM

__all__ = ["QueryFailedError", "StatefulQuery", "stateful_queries", "told_in", "told_shortly"]

Call = TypeVar("Call", bound=Callable[..., Any])
_TASKS_END_S: Final = 5.0  # Spark kills a Python worker two seconds after it asked it to end
_TASKS_LOOK_S: Final = 0.05
_JOBS_LOOKED_AT: Final = 3  # the newest: a query that runs for long has many
_RUN: Final = re.compile(r"\brunId = ([0-9a-f-]{36})\b")

# Where Python or Spark puts the text of an error of ours. A user's own error may quote one.
_CODE: Final = re.compile(r"(?:^|\bstatebackend(?:\.\w+)*: )\[(SB\d{4})\] ", re.MULTILINE)
# What Spark's worker says where it cannot load our function.
_NO_PACKAGE: Final = re.compile(
    r"^ModuleNotFoundError: No module named 'statebackend\b", re.MULTILINE
)
# Python prints the error that was raised last behind these; and before them what led to it.
_CHAIN: Final = re.compile(
    r"\n(?:The above exception was the direct cause of the following exception:"
    r"|During handling of the above exception, another exception occurred:)\n"
)
# What `task_errors.details`, Python, Spark or the JVM put behind a sentence.
_BEHIND: Final = re.compile(
    r"\n  at \S.*:\d+ in |\ncaused by |\n\s+at |\n\s*SQLSTATE: |\n\nDriver stacktrace:"
    r"|\nJVM stacktrace:|\n=== Streaming Query ===|\nTraceback \(most recent call last\):"
    r"| SQLSTATE: \w{5}\s*(?=\n|$)"
)


class QueryFailedError(captured.StreamingQueryException):
    """Why a query failed: Spark's exception, with the text of our error.

    Attributes:
        error: what failed it, with its code.
        whole: Spark's text, with the stacks and the plan.
    """

    def __init__(self, spark: captured.StreamingQueryException, error: StateBackendError) -> None:
        # Not Spark's own __init__: it would write the same error into its log again.
        self.__dict__.update(spark.__dict__)
        self.error, self.whole = error, str(spark)
        self.args = (str(error),)

    def __str__(self) -> str:
        return str(self.error)


def told_in(text: str) -> StateBackendError | None:
    """The first of our errors in a text of Spark's, without what stands around it; None: none.

    Nor is there one where the user's code caught it and raised an error of its own. A worker that
    lacks this package says so in Python's words: an executor may have come after the start.
    """
    chain = list(_CHAIN.finditer(text))
    found = _CODE.search(text, chain[-1].end() if chain else 0)
    if found is None:
        return _no_package() if _NO_PACKAGE.search(text) else None
    end = _BEHIND.search(text, found.end())
    said = text[found.end() : end.start() if end else len(text)]
    return error_for_code(found[1], said.strip(), "")


def _no_package() -> StateBackendError:
    return EnvironmentMissingError(
        "A Python worker of Spark's has no package statebackend.",
        todo="Install the package for the workers' interpreter on every executor, or set "
        "PYSPARK_PYTHON to one that has it before the session is made.",
    )


def _short(error: StreamingQueryException) -> StreamingQueryException:
    """What is told of a failed query: our error, or Spark's exception where none is in it."""
    if not isinstance(error, captured.StreamingQueryException):
        return error
    told = told_in(str(error))
    return error if told is None else QueryFailedError(error, told)


def _has_ended(context: Any, run: str) -> bool:
    """Whether the newest jobs of a query's run have ended, with all of their tasks."""
    tracker = context.statusTracker()
    for number in sorted(tracker.getJobIdsForGroup(run))[-_JOBS_LOOKED_AT:]:
        job = tracker.getJobInfo(number)
        stages = [tracker.getStageInfo(stage) for stage in job.stageIds] if job else []
        if job and (job.status == "RUNNING" or any(one and one.numActiveTasks for one in stages)):
            return False
    return True


def _wait_for_tasks(failure: str) -> None:
    """Let Spark end a failed query's other tasks: it logs the stack of each, behind our error."""
    until_s = SYSTEM.monotonic_s() + _TASKS_END_S
    run = _RUN.search(failure)
    with contextlib.suppress(Exception):  # Spark may be gone
        context = SparkContext._active_spark_context
        while run and not _has_ended(context, run[1]) and SYSTEM.monotonic_s() < until_s:
            SYSTEM.sleep_s(_TASKS_LOOK_S)


def told_shortly(call: Call) -> Call:
    """Decorates a method of Spark's: a query that failed by an error of ours is told by that."""

    @functools.wraps(call)
    def told(*given: Any, **named: Any) -> Any:
        try:
            return call(*given, **named)
        except StreamingQueryException as error:
            short = _short(error)
            if isinstance(short, QueryFailedError):
                _wait_for_tasks(short.whole)
            raise short from None

    return told  # type: ignore[return-value]


class StatefulQuery(StreamingQuery):
    """Spark's ``StreamingQuery``. Its errors begin and end with what happened.

    Everything else is Spark's.
    """

    awaitTermination = told_shortly(StreamingQuery.awaitTermination)
    processAllAvailable = told_shortly(StreamingQuery.processAllAvailable)

    def exception(self) -> StreamingQueryException | None:
        """As Spark's, and as :meth:`awaitTermination` raises it."""
        found: Any = super().exception()
        return None if found is None else _short(found)


@contextlib.contextmanager
def stateful_queries() -> Iterator[None]:
    """Around a start by Spark's own method: the query that it returns is a `StatefulQuery`."""
    made = getattr(DataStreamWriter, "_sq", None)
    if made is None:  # private: where it is another's, a failed query is told as Spark tells it
        yield
        return
    DataStreamWriter._sq = lambda self, jsq: StatefulQuery(jsq)  # type: ignore[method-assign]
    try:
        yield
    finally:
        DataStreamWriter._sq = made  # type: ignore[method-assign]
