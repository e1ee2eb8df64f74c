"""From what a person wrote to what is meant: names of jobs and faults, functions, seeds."""

from __future__ import annotations

import importlib
import secrets
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statebackend.errors import SettingError

if TYPE_CHECKING:
    from recovery.drill.run.schedule import DrillFault, Strike

__all__ = ["check_name", "drawn_seed", "impossible", "kind_of", "load"]


def drawn_seed() -> int:
    """A seed for a drill that was given none."""
    return secrets.randbelow(1 << 31)


def check_name(name: str, known: Iterable[str], *, kind: str) -> None:
    """Nothing, if the name is known.

    Raises:
        SettingError: it is not; the text names the nearest ones.
    """
    names = list(known)
    if name in names:
        return
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    meant = f"Did you mean {' or '.join(near)}? " if near else ""
    raise SettingError(
        f"There is no {kind} {name!r}.", todo=f"{meant}`statebackend drill list` shows all."
    )


def impossible(
    faults: Iterable[str | DrillFault | Strike],
    *,
    cluster: str = "",
    store: str = "file",
    commit: str = "sync",
    kind: str = "batches",
) -> dict[str, str]:
    """The faults that cannot be made in a drill with these options, each with the reason.

    What only the drill finds out, such as a missing compiler, is not among the reasons.

    Raises:
        SettingError: there is no fault of such a name.
    """
    from recovery.drill.catalogue import ALL
    from recovery.drill.faults.needs import Given, missing
    from recovery.drill.run.schedule import Strike

    given = Given(cluster=cluster, s3=store != "file", commit=commit, compiler=True, kind=kind)
    reasons: dict[str, str] = {}
    for one in faults:
        if isinstance(one, str):
            check_name(one, ALL, kind="fault")
            fault = ALL[one]
        else:
            fault = one.fault if isinstance(one, Strike) else one
        if reason := missing(fault, given):
            reasons[fault.name] = reason
    return reasons


def kind_of(job: Any) -> str:
    """The kind of what `run_drill` takes as its job."""
    from recovery.drill.jobs.bundled_jobs import BUNDLED

    return str(getattr(BUNDLED.get(job, job) if isinstance(job, str) else job, "kind", "batches"))


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
        near = get_close_matches(name, vars(module), n=3, cutoff=0.5)
        raise SettingError(
            f"{module_name} has no {name!r}.",
            todo=f"Did you mean {' or '.join(near)}?" if near else "Look at its spelling.",
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
