"""The faults that drills know, by name."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from recovery.drill.faults.drill_fault import DrillFault

__all__ = ["ALL"]

_MODULES: Final = (
    "process_faults",
    "disk_faults",
    "store_faults",
    "clock_faults",
    "mid_operation_crashes",
    "rescale_and_rebalance",
    "savepoint_faults",
)


def _assembled() -> dict[str, DrillFault]:
    found: dict[str, DrillFault] = {}
    for module in _MODULES:
        for fault in import_module(f"{__name__}.{module}").FAULTS:
            if fault.name in found:
                raise ValueError(f"There are two faults of the name {fault.name!r}.")
            found[fault.name] = fault
    return found


ALL: Final[dict[str, DrillFault]] = _assembled()
