"""What goes wrong in a user's code, as errors that say where: state, key and the user's lines.

All of it is found when the error is there, from its traceback: what goes well pays nothing.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from types import CodeType
from typing import Any, Final

from statebackend.errors import (
    ProcessorError,
    StateBackendError,
    UsageError,
    ValueMismatchError,
)
from statebackend.operators.rows.returned_row_checks import MisfitError

__all__ = ["batch_failure", "call_once", "described", "failure"]

_OWN_CODE: Final = str(Path(__file__).parents[2]) + os.sep
_STATE_CODE: Final = tuple(
    str(Path(__file__).parents[2] / room) + os.sep for room in ("state", "operators/vector")
)
_COMPILED: Final = (".pyx", ".pxi")
_FRAMES_SHOWN: Final = 6
_KEY_SHOWN: Final = 200  # characters

Key = tuple[Any, ...]


def failure(uid: str, key: Key, error: Exception, writer: str) -> UsageError:
    """The typed error for what came out of the call for a key, or of its output.

    Args:
        uid: the operator.
        error: what was raised; of our own only a UsageError, which keeps its type.
        writer: the module that takes the output.
    """
    if isinstance(error, UsageError):
        return _located(error, key)
    if isinstance(error, TypeError) and _raised_in(error, writer):
        return ProcessorError(
            f"The processor of operator {uid!r} returned what is no iterable of rows ({error}) "
            f"for key {_shown(key)}.",
            todo="Return a list, or yield: one item per row (of a pandas processor, per "
            "DataFrame).",
        )
    return ProcessorError(
        f"The processor of operator {uid!r} raised {_said(error)} for key {_shown(key)}"
        f"{_where(error)}.",
        todo=_mend(error),
    )


def batch_failure(uid: str, count: int, error: Exception) -> UsageError:
    """As :func:`failure`, for the call for a batch of ``count`` keys."""
    if isinstance(error, UsageError):
        return _located(error)
    return ProcessorError(
        f"The processor of operator {uid!r} raised {_said(error)} in a batch of {count} keys"
        f"{_where(error)}.",
        todo=_mend(error),
    )


def described(uid: str, processor: Any) -> str:
    """A processor for errors about its output: with where the method that gives it begins."""
    for name in ("handleInputRows", "process", "process_left"):
        code = getattr(getattr(processor, name, None), "__code__", None)
        if code is not None:
            return f"The processor of operator {uid!r}{_defined(code)}"
    return f"The processor of operator {uid!r}"


def call_once(uid: str, what: str, function: Callable[[], Any]) -> None:
    """Run ``init`` (``open``) or ``close`` of a processor, typing what it raises.

    Raises:
        UsageError: one of ours, with the user's line.
        ProcessorError: any other, and a method that is a generator: nothing of it would run.
    """
    try:
        returned = function()
    except UsageError as error:
        raise _located(error) from error
    except StateBackendError:
        raise
    except Exception as error:
        raise ProcessorError(
            f"{what}() of operator {uid!r}'s processor raised {_said(error)}{_where(error)}.",
            todo="Mend the processor.",
        ) from error
    if isinstance(returned, Coroutine | Generator):
        returned.close()
        code = getattr(returned, "gi_code", None) or getattr(returned, "cr_code", None)
        raise ProcessorError(
            f"{what}() of operator {uid!r}'s processor is a generator or coroutine, of which "
            f"nothing runs{_defined(code)}.",
            todo=f"Write {what}() as a plain function, without yield and async.",
        )


# --- what errors say -----------------------------------------------------------------------------


def _located(error: UsageError, key: Key | None = None) -> UsageError:
    """The same error with the state that it is about, the key, and the user's lines."""
    if isinstance(error, MisfitError):
        of_key = "" if key is None else f", for key {_shown(key)}"
        return ValueMismatchError(
            f"{error.what.removesuffix('.')}{of_key}{error.where}.", todo=error.todo
        )
    where, name = _where(error), _state_of(error)
    what = error.what.removesuffix(".")
    if name and f"state {name!r}".lower() not in what.lower():
        what += f", in state {name!r}"
    if where and key is not None:  # without: about output, which may be of an earlier key
        what += f", for key {_shown(key)}"
    return type(error)(f"{what}{where}.", todo=error.todo)


def _mend(error: Exception) -> str:
    kept = "nothing of this epoch was kept, the query goes on from the last checkpoint."
    if isinstance(error, ModuleNotFoundError):
        return (
            "Send your own modules with spark.sparkContext.addPyFile() before the query starts, or "
            f"with --py-files, and install others on every executor; {kept}"
        )
    return f"Mend the processor; {kept}"


def _where(error: Exception) -> str:
    """The user's lines, outermost first: of chained errors Spark shows the last one only."""
    frames = [
        f"{frame.filename}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_OWN_CODE) and not frame.filename.endswith(_COMPILED)
    ]
    if len(frames) > _FRAMES_SHOWN:  # the user's own are rather the outer ones
        half = _FRAMES_SHOWN // 2
        frames = [*frames[:half], "...", *frames[-half:]]
    return " at " + ", ".join(frames) if frames else ""


def _defined(code: CodeType | None) -> str:
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


def _state_of(error: Exception) -> str:
    """The state whose method raised, found by its frame: so it costs nothing when all goes well."""
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename.startswith(_STATE_CODE):
            name = getattr(frame.f_locals.get("self"), "_name", "")
            found = name if isinstance(name, str) and name else found
    return found


def _raised_in(error: Exception, module: str) -> bool:
    """Whether an error was raised in a module itself, and not in what it called."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_globals.get("__name__") == module


def _said(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its __str__ is the user's, too
        return type(error).__name__


def _shown(key: Key) -> str:
    try:
        text = repr(key)
    except Exception:
        return "that cannot be shown"
    return text if len(text) <= _KEY_SHOWN else f"{text[:_KEY_SHOWN]}..."
