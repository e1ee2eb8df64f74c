"""Which error of ours a text of Spark's tells, and what a worker writes behind one."""

from __future__ import annotations

import importlib
import re

import pytest

from statebackend.errors import (
    CorruptionError,
    EnvironmentMissingError,
    ProcessorError,
    StateBackendError,
    UsageError,
)
from statebackend.keygroups import check_parallelism
from statebackend.operators.errors.task_errors import details
from statebackend.operators.errors.user_errors import failure
from statebackend.spark.query_failures import told_in

PLAN = "\n=== Streaming Query ===\nIdentifier: [id = 1]\nLogical Plan:\nProject [a#1]"
OURS = "statebackend.errors.ProcessorError: [SB1014] The processor raised. Mend it."
MORE = "\n\nThe above exception was the direct cause of the following exception:\n\n"
TRACE = 'Traceback (most recent call last):\n  File "job.py", line 3, in f\n'


@pytest.mark.parametrize(
    "text",
    [
        f"[PYTHON_EXCEPTION] Thrown from the Python worker: {OURS}\n  at job.py:3 in f",
        f"[FOREACH_BATCH] Reason: Return Message: {TRACE}{OURS}\n",
        "[SB1014] The processor raised. Mend it. SQLSTATE: 38000",
        f"Reason: {OURS}\ncaused by KeyError: 'n'\n  at job.py:3 in f\n SQLSTATE: 38000",
        f"{TRACE}KeyError: 'n'{MORE}{TRACE}{OURS}\n\nJVM stacktrace:\njava.lang.X",
    ],
)
def test_an_error_of_ours_is_told_alone(text: str) -> None:
    told = told_in(text + PLAN)
    assert isinstance(told, ProcessorError)
    assert str(told) == "[SB1014] The processor raised. Mend it."


def test_a_worker_without_the_package_is_told_in_one_sentence() -> None:
    told = told_in(
        f"{TRACE}ModuleNotFoundError: No module named 'statebackend'\n SQLSTATE: X{PLAN}"
    )
    assert isinstance(told, EnvironmentMissingError)
    assert "PYSPARK_PYTHON" in str(told)


@pytest.mark.parametrize(
    "text",
    [
        "ModuleNotFoundError: No module named 'snapshots'",
        "ValueError: no such user",
        "ValueError: as in 'statebackend': [SB1014] is what it said",
        "ValueError: the job said [SB1014] The processor raised. Mend it.",
        "mine.StatebackendError: [SB1014] is what I call it",
        f"{TRACE}{OURS}{MORE}{TRACE}OrderError: batch 7 was not written",
    ],
)
def test_an_error_of_the_user_that_quotes_or_follows_ours_is_left_as_it_is(text: str) -> None:
    assert told_in(f"[FOREACH_BATCH] Reason: {TRACE}{text}{PLAN}") is None


def _fails() -> None:
    fields: dict[str, int] = {}
    fields["n"]


def _caused(error: StateBackendError) -> str:
    """Of an error that a library's function and a user's led to."""
    try:
        check_parallelism(0, 0)
    except UsageError as library:
        try:
            _fails()
        except KeyError as user:
            user.__cause__, error.__cause__ = library, user
    return details(error)


def test_behind_a_users_mistake_stand_the_users_own_lines_alone() -> None:
    text = _caused(ProcessorError("The processor raised."))
    assert re.search(
        r"caused by KeyError: 'n'\n.*\n  at .*test_told_errors\.py:\d+ in _fails\n", text
    )
    assert "statebackend/keygroups.py" not in text


def test_a_cause_whose_sentence_and_lines_the_error_has_is_not_told_twice() -> None:
    try:
        _fails()
    except KeyError as user:
        error = failure("counter", ("ann",), user, "writer")
        error.__cause__ = user
        assert details(error) == ""
        other = ProcessorError("The processor raised KeyError: 'n'.")
        other.__cause__ = user
        assert "  at " in details(other), "the sentence does not say where"


def test_behind_any_other_error_stand_all_lines() -> None:
    assert "statebackend/keygroups.py" in _caused(CorruptionError("A file is damaged."))


def test_a_module_that_a_processor_imports_late_is_told_with_how_it_is_sent() -> None:
    try:
        importlib.import_module("no_such_module_of_mine")
    except ModuleNotFoundError as user:
        text = str(failure("counter", ("ann",), user, "writer"))
    assert "No module named 'no_such_module_of_mine'" in text
    assert "addPyFile()" in text
    assert "--py-files" in text
