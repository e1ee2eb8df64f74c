"""Finds out before a start whether Spark's workers have this package and a local directory."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from recovery.local.private_folders import try_folder
from statebackend.errors import EnvironmentMissingError, StateBackendError, error_for_code
from statebackend.operators.errors import lost_jvm as jvm
from statebackend.spark.local_directories import local_mode_folder
from statebackend.system import SYSTEM
from statebackend.threads import Future

__all__ = ["check_workers"]

_log = logging.getLogger("statebackend.spark")
_MISSING: Final = re.compile(r"No module named '(statebackend|snapshot|recovery)\b")
# Raised in a file of ours: what it imports is not there.
_LACKING: Final = re.compile(
    r'File "\S*/(?:statebackend|snapshot|recovery)/\S+", line \d+, in <module>\n.*\n'
    r"(?:[\s~^]*\n)?ModuleNotFoundError: No module named '([\w.]+)'"
)
_VERSIONS: Final = re.compile(
    r"\[PYTHON_VERSION_MISMATCH\] Python in worker has different version: (\S+) than that in "
    r"driver: ([\d.]+)"
)
_TASK: Final = "statebackend.spark.worker.task"  # with all that the query's tasks import
_TASKS_MAX: Final = 16
_ANSWER_S: Final = 10.0
_BUSY_S: Final = 50.0  # more, for a worker that has begun and is slow


class _Probed:
    done: ClassVar[set[tuple[str, str]]] = set()  # applications, each with a local directory


Found = tuple[str, str, str]  # the code of an error, or "" for Python's; what; what to do


def _look(local_dir: str) -> Callable[[Iterable[int]], Iterator[Found]]:
    """What workers run. It is pickled with its code, so that one without the package can answer.

    What it raised, Spark would log twice, with a stack of its own.
    """
    task = _TASK

    def look(_: Iterable[int]) -> Iterator[Found]:
        import importlib
        import socket
        import traceback

        try:
            importlib.import_module(task)
        except ModuleNotFoundError:
            yield "", traceback.format_exc(), ""
            return
        except Exception as error:
            if not hasattr(error, "todo"):
                raise  # the query itself says what it is
            yield error.code, error.what, error.todo  # type: ignore[attr-defined]
            return
        folders = importlib.import_module("recovery.local.private_folders")
        expanded = importlib.import_module("statebackend.system").expanded
        try:
            folders.try_folder(expanded(local_dir))
        except importlib.import_module("statebackend.errors").LocalDirError as error:
            what = f"{error.what} So says a worker on host {socket.gethostname()}."
            yield error.code, what, error.todo

    return look


def check_workers(spark: SparkSession, local_dir: str) -> None:
    """Refuse a start whose tasks would find no such package, or could not write their copies.

    Asked once in an application. In local mode the driver tries the directory itself, and a job is
    run only where the workers have another interpreter than the driver. In a cluster a job of a few
    tasks asks the executors that are there; without any, nothing is asked. Where other jobs have
    all cores, it waits ten seconds and asks nothing; the next start asks again.

    Args:
        local_dir: as it was set; may name environment variables of the executors; "": the default.

    Raises:
        EnvironmentMissingError: naming the interpreter. LocalDirError: naming the directory.
        SparkLostError: Spark's JVM is gone.
    """
    context = spark.sparkContext
    with jvm.calls():
        probe = str(context.applicationId), local_dir
        local = bool(context._jsc.sc().isLocal())
        # The driver is one of those.
        executors = 1 if local else context._jsc.sc().getExecutorMemoryStatus().size() - 1
    if probe in _Probed.done or not executors:
        return
    if local:
        try_folder(local_mode_folder(spark, local_dir))
        if _is_this(context.pythonExec):
            return
    tasks = min(int(executors), _TASKS_MAX)
    try:
        found = _asked(context, _look(local_dir), tasks)
    except (PySparkException, Py4JJavaError) as error:
        if versions := _VERSIONS.search(str(error)):
            raise EnvironmentMissingError(
                f"Spark's Python workers run {context.pythonExec}, which is Python "
                f"{versions[1]}; the driver runs Python {versions[2]}.",
                todo="Set PYSPARK_PYTHON to a Python of the driver's version, with the package, "
                "before the session is made.",
            ) from None
        return  # the query itself says what it is
    if found is None:
        return
    for one in found:
        if (refused := _refused(context.pythonExec, *one)) is None:
            return  # as above
        raise refused
    _Probed.done.add(probe)


def _refused(python: str, code: str, what: str, todo: str) -> StateBackendError | None:
    """The error for what a worker found; None: it is not for the probe to tell."""
    if code:
        return error_for_code(code, what, todo)
    if (lacks := _lacking(what)) is None:
        return None
    return EnvironmentMissingError(
        f"Spark's Python workers run {python}, which has no {lacks}; the driver runs "
        f"{sys.executable}.",
        todo="Install the package for that interpreter on every executor, or set "
        "PYSPARK_PYTHON to one that has it before the session is made.",
    )


def _lacking(text: str) -> str | None:
    """What the workers' interpreter has not, by an error of theirs; None: it speaks of other."""
    if _MISSING.search(text):
        return "package statebackend"
    if found := _LACKING.search(text):
        return f"module {found[1]!r}, which the package statebackend needs"
    return None


def _asked(context: Any, look: Callable[[Iterable[int]], Any], tasks: int) -> list[Any] | None:
    """What a job of so many tasks found; None: it had no answer in time, and is cancelled."""
    group = f"statebackend-{SYSTEM.new_id()}"
    answer: Future[list[Any]] = SYSTEM.threads.future()

    def ask() -> None:
        try:
            with jvm.calls():
                context.setJobGroup(group, "statebackend asks the workers", interruptOnCancel=True)
                answer.set_result(
                    context.parallelize(range(tasks), tasks).mapPartitions(look).collect()
                )
        except BaseException as error:
            answer.set_exception(error)

    SYSTEM.threads.start(ask, "statebackend-probe")
    if SYSTEM.threads.wait([answer], _ANSWER_S) or (
        _has_begun(context, group) and SYSTEM.threads.wait([answer], _BUSY_S)
    ):
        return answer.result()
    _log.warning(
        "Spark's workers did not answer in time whether they have the package and a local "
        "directory: perhaps other jobs have all cores; the query starts unasked"
    )
    with contextlib.suppress(Exception):  # the query says it, if Spark is gone
        context.cancelJobGroup(group)
    return None


def _has_begun(context: Any, group: str) -> bool:
    """Whether a task of a group of jobs runs: it has a core, and will answer."""
    with contextlib.suppress(Exception):
        tracker = context.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
        stages = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
        return any(stage.numActiveTasks > 0 for stage in stages if stage)
    return False


def _is_this(command: str) -> bool:
    found = shutil.which(command)
    return found is not None and os.path.dirname(found) == os.path.dirname(sys.executable)
