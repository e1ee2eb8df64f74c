"""Faults on purpose: what a job must survive, made to happen and counted.

`run_drill` runs a job on real processes, strikes it, and checks what it has put out.

`FaultProxy` stands between S3 clients and an S3 server. What it does to which request is decided by
a `FaultPlan`: a pure function of a seed and of the facts of the request.

Names are looked up when they are first used: importing this package loads nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recovery.drill.faults import Calm as Calm
    from recovery.drill.faults import Chance as Chance
    from recovery.drill.faults import Facts as Facts
    from recovery.drill.faults import Fault as Fault
    from recovery.drill.faults import FaultPlan as FaultPlan
    from recovery.drill.faults import FirstOf as FirstOf
    from recovery.drill.faults import Kind as Kind
    from recovery.drill.faults import Rule as Rule
    from recovery.drill.faults import Script as Script
    from recovery.drill.faults import Weather as Weather
    from recovery.drill.faults import draw as draw
    from recovery.drill.faults import stormy as stormy
    from recovery.drill.job import DrillJob as DrillJob
    from recovery.drill.ledger import Count as Count
    from recovery.drill.ledger import RequestEntry as RequestEntry
    from recovery.drill.outcome import DrillReport as DrillReport
    from recovery.drill.proxy import FaultProxy as FaultProxy
    from recovery.drill.runner import run_drill as run_drill
    from recovery.drill.s3 import Verb as Verb
    from recovery.drill.s3 import group_of as group_of
    from recovery.drill.scenario import DrillFault as DrillFault
    from recovery.drill.scenario import Strike as Strike

# public name -> the module it lives in
_EXPORTS: dict[str, str] = {
    "Calm": "recovery.drill.faults",
    "Chance": "recovery.drill.faults",
    "Count": "recovery.drill.ledger",
    "DrillFault": "recovery.drill.scenario",
    "DrillJob": "recovery.drill.job",
    "DrillReport": "recovery.drill.outcome",
    "Facts": "recovery.drill.faults",
    "Fault": "recovery.drill.faults",
    "FaultPlan": "recovery.drill.faults",
    "FaultProxy": "recovery.drill.proxy",
    "FirstOf": "recovery.drill.faults",
    "Kind": "recovery.drill.faults",
    "RequestEntry": "recovery.drill.ledger",
    "Rule": "recovery.drill.faults",
    "Script": "recovery.drill.faults",
    "Strike": "recovery.drill.scenario",
    "Verb": "recovery.drill.s3",
    "Weather": "recovery.drill.faults",
    "draw": "recovery.drill.faults",
    "group_of": "recovery.drill.s3",
    "run_drill": "recovery.drill.runner",
    "stormy": "recovery.drill.faults",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> object:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
