"""Puts code and sentence first in the error of a task that reaches the user.

Spark passes on all that Python prints of an error. That begins with the traceback: some thousand
characters of Spark's worker and of this library stand before the sentence that counts.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from pyspark import TaskContext

from statebackend import system
from statebackend.errors import StateBackendError, UsageError

__all__ = ["code_first", "details"]

_FRAMES_SHOWN: Final = 12  # of each error in the chain, the innermost
_DETAILS_SHOWN: Final = 3_000  # characters

Function = TypeVar("Function", bound=Callable[..., Iterator[Any]])


def code_first(function: Function) -> Function:
    """Decorates a function that Spark's workers run: an error of ours begins with its code."""

    @functools.wraps(function)
    def told(*given: Any) -> Iterator[Any]:
        try:
            yield from function(*given)
        except StateBackendError as error:
            if TaskContext.get() is None:  # no worker of Spark's: the caller has the error itself
                raise
            if behind := details(error):
                error.add_note(behind)
            system.hide_worker_traceback()
            raise

    return told  # type: ignore[return-value]


def details(error: BaseException) -> str:
    """The stack frames of an error, then those of its causes, unless its sentence has them.

    Of a mistake in the user's code they are the user's own: this library's say nothing of it.
    """
    theirs, said = isinstance(error, UsageError), str(error)
    lines: list[str] = []
    one: BaseException | None = error
    seen: set[int] = set()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        # Not in Python's form: Spark would take it for a traceback, and put it first again.
        frames = list(traceback.extract_tb(one.__traceback__))
        if theirs:
            frames = [frame for frame in frames if not frame.filename.startswith(system.OWN_CODE)]
        places = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
        what = "" if one is error else "".join(traceback.format_exception_only(one)).strip()
        short = what.removeprefix(f"{type(one).__module__}.")
        if one is error or not all(part in said for part in (short, *places)):
            lines += [f"caused by {what}"] if what else []
            lines += [f"  at {place}" for place in places[-_FRAMES_SHOWN:]]
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    text = "\n".join(lines)
    if len(text) > _DETAILS_SHOWN:
        half = _DETAILS_SHOWN // 2
        text = f"{text[:half]}\n...\n{text[-half:]}"
    return text
