"""Functions of a user's module by name: found here, and found again by another process."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import msgspec

from statebackend.errors import SettingError
from statebackend.texts import did_you_mean

__all__ = ["FunctionAddress", "address_of", "function_at", "load"]


class FunctionAddress(msgspec.Struct, frozen=True):
    """Where another process finds a function.

    Attributes:
        name: `module:name`. folder: to be searched for the module; empty: where Python does.
    """

    name: str
    folder: str = ""


def address_of(function: Callable[..., Any]) -> FunctionAddress:
    """Where another process finds a function.

    Raises:
        SettingError: it is none of a module's top level.
    """
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if not name or "<" in name or module is None:
        raise SettingError(
            f"The job {name or function!r} cannot be found by another process: it is a lambda, "
            f"nested in another function, or an object.",
            todo="Each driver of a drill is a process of its own, which imports the job. Give a "
            "function of a module's top level.",
        )
    file = inspect.getsourcefile(function)
    if file is None:
        raise SettingError(
            f"The job {name!r} has no file that another process could import.",
            todo="Put it into a module.",
        )
    if module.__name__ != "__main__" and _finds(module.__name__, file):
        return FunctionAddress(f"{module.__name__}:{name}")
    path = Path(file).resolve()
    return FunctionAddress(f"{path.stem}:{name}", str(path.parent))


def function_at(name: str) -> Any:
    """What `module:name` names, of the modules that can be imported here."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _finds(module: str, file: str) -> bool:
    """Whether Python's path leads from the module's name to the file, in another process too."""
    top, *rest = module.split(".")
    spec = PathFinder.find_spec(top)
    if spec is None and rest:  # an installed package may have a finder of its own
        with contextlib.suppress(ValueError):
            spec = importlib.util.find_spec(top)
    if spec is None:
        return False
    if rest:
        folders = [Path(place).joinpath(*rest) for place in spec.submodule_search_locations or ()]
        origins = [path for f in folders for path in (f.with_suffix(".py"), f / "__init__.py")]
    else:
        origins = [Path(spec.origin or "")]
    return any(path.exists() and path.samefile(file) for path in origins)


def load(place: str, *, home: str = "") -> Any:
    """What `module:name` or `path/to/file.py:name` names; `name` alone is looked for in `home`.

    The module's folder is put on this process's import path, so that its module can be imported by
    name from here on.

    Args:
        place: as typed.
        home: the module or file of another place, such as the job's when a truth is looked for.

    Raises:
        SettingError: there is no such file, module or name, or importing it failed.
    """
    module_name, _, name = place.rpartition(":")
    module_name = module_name or home
    if not module_name or not name:
        raise SettingError(
            f"{place!r} names no function.",
            todo="Write `module:function` or `path/to/file.py:function`.",
        )
    module = _module(module_name)
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise SettingError(
            f"{module_name} has no {name!r}.",
            todo=did_you_mean(name, vars(module), most=3) or "Look at its spelling.",
        ) from error


def _module(name: str) -> Any:
    folder = Path.cwd()  # an entry point's process has not even this on its path
    file = Path(name).resolve() if name.endswith(".py") else None
    if file is not None:
        if not file.is_file():
            raise SettingError(f"There is no file {file}.", todo="Look at the path.")
        folder, name = file.parent, file.stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(name)
    except Exception as error:  # whatever the user's module does when it is imported
        raise SettingError(
            f"{name} could not be imported: {type(error).__name__}: {error}.",
            todo=f"Try `python -c 'import {name}'` in {folder}.",
        ) from error
    if file is not None and Path(module.__file__ or "").resolve() != file:
        raise SettingError(
            f"{file} is hidden by another module of the name {name!r}.", todo="Rename the file."
        )
    return module
