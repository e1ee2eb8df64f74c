"""The faults that drills know, by name."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Final

from recovery.drill.scenario import DrillFault

__all__ = ["ALL"]

_MODULES: Final = ("processes", "disks", "stores", "clocks", "middles", "moves", "savepoints")


def _assembled() -> dict[str, DrillFault]:
    found: dict[str, DrillFault] = {}
    for module in _MODULES:
        if find_spec(f"{__name__}.{module}") is None:
            continue
        for fault in import_module(f"{__name__}.{module}").FAULTS:
            if fault.name in found:
                raise ValueError(f"There are two faults of the name {fault.name!r}.")
            found[fault.name] = fault
    return found


ALL: Final[dict[str, DrillFault]] = _assembled()
