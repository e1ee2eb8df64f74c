"""Why a processor cannot be pickled on the driver, or loaded in a worker."""

from __future__ import annotations

import traceback
import types
from collections.abc import Iterator
from typing import Any

from pyspark import cloudpickle

from statebackend.errors import ProcessorError

__all__ = ["class_attributes", "explain_unpicklable", "unloadable"]

_DEPTH = 8
_ENTRIES = 1000  # of a container that are tried, one by one


def explain_unpicklable(processor: Any, error: Exception | None = None) -> str:
    """What stands in the way, such as ``self.db (sqlite3.Connection): cannot pickle ...``.

    Args:
        processor: which could not be pickled.
        error: what pickling it raised.
    """
    found = _search("self", processor, set(), _DEPTH)
    if found is None:
        return f"{type(error).__name__}: {error}" if error else "it can be pickled"
    path, value, cause = found
    return f"{path} ({_type_name(value)}): {type(cause).__name__}: {cause}".rstrip(". ")


def unloadable(uid: str, error: Exception) -> ProcessorError:
    """The typed error for a processor of an operator that does not load in a worker.

    Args:
        error: what unpickling it raised. A module that is not there is told apart from one that is
            there and fails when it is imported.
    """
    said = f"{type(error).__name__}: {error}".rstrip(".")
    what = f"The processor of operator {uid!r} cannot be loaded in the worker"
    frames = traceback.extract_tb(error.__traceback__)
    importing = [frame for frame in frames if frame.name == "<module>"]
    if isinstance(error, ModuleNotFoundError) and error.name:
        # Of several modules that import each other the last one names what is to be sent.
        by = f"{importing[-1].filename}:{importing[-1].lineno} imports" if importing else ""
        file = _file_of(error.name)
        return ProcessorError(
            f"{what}: the worker has no module {error.name!r}, which {by or 'the driver has'}.",
            todo=f"Send your own modules with spark.sparkContext.addPyFile('{file}') "
            "before the query starts, or with --py-files (a folder as a zip file); "
            "install others on every executor.",
        )
    if importing:
        last = importing[-1]
        return ProcessorError(
            f"{what}: a module that it needs is there, and fails when it is imported "
            f"({said}) at {last.filename}:{last.lineno}.",
            todo="Give that module on every executor what it needs, or mend the module.",
        )
    return ProcessorError(f"{what} ({said}).", todo="Install on the executors what it imports.")


def _file_of(module: str) -> str:
    """What to send so that a module is there: its file, or its package as a zip file."""
    top, _, below = module.partition(".")
    return f"{top}.zip" if below else f"{top}.py"


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _failure(value: Any) -> Exception | None:
    try:
        cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    except Exception as error:
        return error
    return None


def _search(path: str, value: Any, seen: set[int], depth: int) -> tuple[str, Any, Exception] | None:
    """The innermost object on the way that cannot be pickled alone."""
    if id(value) in seen:
        return None
    seen.add(id(value))
    cause = _failure(value)
    if cause is None:
        return None
    if depth > 0:
        for name, one in _inside(path, value):
            found = _search(name, one, seen, depth - 1)
            if found is not None:
                return found
    return path, value, cause


def _inside(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, one in list(value.items())[:_ENTRIES]:
            yield f"{path}[{key!r:.40}]", one
            yield f"a key of {path}", key
    elif isinstance(value, list | tuple | set | frozenset):
        for index, one in enumerate(list(value)[:_ENTRIES]):
            yield (f"{path}[{index}]" if isinstance(value, list | tuple) else f"{path}"), one
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
        yield path, value.__func__
    elif isinstance(value, types.FunctionType):
        yield from _captured(path, value)
    elif isinstance(value, type):
        for key, one in class_attributes(value):
            yield f"{value.__name__}.{key}", one
    else:
        for key, one in list(getattr(value, "__dict__", {}).items()):
            yield f"{path}.{key}", one
        yield type(value).__name__, type(value)


def class_attributes(kind: type) -> list[tuple[str, Any]]:
    """What a class defines, without what Python and ``abc`` put there."""
    left_out = ("__dict__", "__weakref__", "_abc_impl")  # cloudpickle leaves these out too
    return [(key, one) for key, one in vars(kind).items() if key not in left_out]


def _captured(path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for key in function.__code__.co_names:
        if key in function.__globals__:
            yield f"global {key} (used in {function.__name__})", function.__globals__[key]
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{key} (captured by {function.__name__})", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for index, one in enumerate(function.__defaults__ or ()):
        yield f"default {index} of {path}", one
