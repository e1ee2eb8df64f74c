"""Workers that lack the package or a local directory are found out before a query starts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from pyspark import cloudpickle
from pyspark.errors import PythonException

from statebackend.errors import EnvironmentMissingError, LocalDirError
from statebackend.operators.errors import lost_jvm
from statebackend.spark.query_failures import told_in
from statebackend.spark.start import worker_probe
from statebackend.spark.start.worker_probe import _look, check_workers


@pytest.fixture(autouse=True)
def _running(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a JVM, as far as the probe can tell."""
    monkeypatch.setattr(lost_jvm, "_stopped", lambda: False)


def _spark(
    application: str,
    python: str,
    says: str | None = None,
    *,
    local: bool = True,
    executors: int = 0,
    found: Any = (),
) -> Any:
    spark = MagicMock()
    context = spark.sparkContext
    context.applicationId, context.pythonExec = application, python
    context._jsc.sc().isLocal.return_value = local
    context._jsc.sc().getExecutorMemoryStatus().size.return_value = executors + 1
    collect = context.parallelize().mapPartitions().collect
    collect.return_value = [("", says, "")] if says is not None else list(found)
    context.parallelize.reset_mock()
    return spark


def test_an_interpreter_without_the_package_is_named(tmp_path: Path) -> None:
    says = "ModuleNotFoundError: No module named 'statebackend'"
    for spark in (
        _spark("a", "/bin/other", says),
        _spark("a", sys.executable, says, local=False, executors=3),
    ):
        with pytest.raises(EnvironmentMissingError, match="which has no package") as raised:
            check_workers(spark, str(tmp_path))
        assert spark.sparkContext.pythonExec in str(raised.value)


def test_an_interpreter_of_another_version_is_named(tmp_path: Path) -> None:
    spark = _spark("j", "/bin/other")
    spark.sparkContext.parallelize().mapPartitions().collect.side_effect = PythonException(
        "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.13 than that in "
        "driver: 3.11, PySpark cannot run with different minor versions."
    )
    with pytest.raises(EnvironmentMissingError, match=r"is Python 3\.13; .* runs Python 3\.11\."):
        check_workers(spark, str(tmp_path))


def test_what_workers_run_is_pickled_without_the_package(tmp_path: Path) -> None:
    """So an interpreter that lacks the package answers, and Spark logs no error of a task."""
    program = (
        "import pickle, sys\n"
        "print(list(pickle.load(sys.stdin.buffer)([]))[0][1])\n"
        "assert 'statebackend' not in sys.modules\n"
    )
    site = Path(cloudpickle.__file__).parents[2]
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.append({str(site)!r})\n{program}",
        ],
        input=cloudpickle.dumps(_look(str(tmp_path))),
        capture_output=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert b"No module named 'statebackend'" in done.stdout, done.stderr.decode()


def test_a_module_that_hides_a_package_in_a_worker_is_named(tmp_path: Path) -> None:
    (tmp_path / "recovery.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", "import statebackend.spark.worker.task"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(worker_probe.__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = told_in(done.stderr)
    assert isinstance(told, EnvironmentMissingError)
    assert f"finds {tmp_path / 'recovery.py'} under that name" in str(told)


def test_a_module_that_the_package_needs_is_named(tmp_path: Path) -> None:
    says = (
        'Traceback (most recent call last):\n  File "/x/statebackend/work_done.py", line 14, in '
        "<module>\n    import msgspec\nModuleNotFoundError: No module named 'msgspec'\n"
    )
    with pytest.raises(
        EnvironmentMissingError, match="which has no module 'msgspec', which the package"
    ):
        check_workers(_spark("i", "/bin/other", says), str(tmp_path))


def test_what_else_a_worker_says_is_left_to_the_query(tmp_path: Path) -> None:
    check_workers(_spark("b", "/bin/other", "No module named 'pandas'"), str(tmp_path))


def test_it_is_asked_once_and_not_of_the_drivers_own_interpreter(tmp_path: Path) -> None:
    spark = _spark("c", "/bin/other")
    for _ in range(2):
        check_workers(spark, str(tmp_path))
    assert spark.sparkContext.parallelize.call_count == 1
    own = _spark("d", sys.executable)
    check_workers(own, str(tmp_path))
    assert own.sparkContext.parallelize.call_count == 0


def test_in_a_cluster_the_executors_that_are_there_are_asked(tmp_path: Path) -> None:
    none = _spark("e", sys.executable, local=False)
    check_workers(none, str(tmp_path))
    assert none.sparkContext.parallelize.call_count == 0, "nobody waits for executors"
    some = _spark("e", sys.executable, local=False, executors=2)
    check_workers(some, str(tmp_path))
    some.sparkContext.parallelize.assert_called_once_with(range(2), 2)


def test_a_local_directory_that_cannot_be_used_is_refused_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalDirError, match="file is not used for task-local copies: it is not a"):
        check_workers(_spark("f", sys.executable), str(tmp_path / "file"))
    with pytest.raises(LocalDirError, match="cannot be used"):
        check_workers(_spark("f", sys.executable), str(tmp_path / "file" / "below"))
    (what,) = _look(str(tmp_path / "file"))([])
    spark = _spark("f", sys.executable, local=False, executors=1, found=[what])
    with pytest.raises(LocalDirError, match=r"it is not a folder\. So says a worker on host"):
        check_workers(spark, str(tmp_path / "file"))


def test_a_cluster_without_a_free_core_is_not_waited_for_and_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_probe, "_ANSWER_S", 0.05)
    busy, groups = threading.Event(), []
    spark = _spark("g", sys.executable, local=False, executors=2)
    context = spark.sparkContext
    context.setJobGroup.side_effect = lambda group, *_, **__: groups.append(group)
    collect = context.parallelize().mapPartitions().collect
    collect.side_effect = lambda: busy.wait(20) and []
    check_workers(spark, str(tmp_path))
    assert "did not answer" in caplog.text
    context.cancelJobGroup.assert_called_once_with(*groups)
    busy.set()
    context.parallelize.reset_mock()
    for _ in range(2):  # it has an answer now, which counts
        check_workers(spark, str(tmp_path))
    assert context.parallelize.call_count == 1


def test_a_worker_that_has_begun_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_probe, "_ANSWER_S", 0.05)
    slow = threading.Event()
    says = "No module named 'statebackend'"
    spark = _spark("h", "/bin/other", says, local=False, executors=2)
    context = spark.sparkContext

    def answer() -> list[tuple[str, str, str]]:
        assert slow.wait(20)
        return [("", says, "")]

    def stage(_: int) -> Any:
        slow.set()
        return MagicMock(numActiveTasks=1)

    context.parallelize().mapPartitions().collect.side_effect = answer
    tracker = context.statusTracker()
    tracker.getJobIdsForGroup.return_value = [0]
    tracker.getJobInfo.return_value.stageIds = [0]
    tracker.getStageInfo.side_effect = stage
    with pytest.raises(EnvironmentMissingError, match="which has no package"):
        check_workers(spark, str(tmp_path))
    assert context.cancelJobGroup.call_count == 0
