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
    from recovery.drill.faults.drill_fault import DrillFault as DrillFault
    from recovery.drill.jobs.drill_job import DrillJob as DrillJob
    from recovery.drill.proxy.fault_plan import Calm as Calm
    from recovery.drill.proxy.fault_plan import Chance as Chance
    from recovery.drill.proxy.fault_plan import Facts as Facts
    from recovery.drill.proxy.fault_plan import Fault as Fault
    from recovery.drill.proxy.fault_plan import FaultPlan as FaultPlan
    from recovery.drill.proxy.fault_plan import FirstOf as FirstOf
    from recovery.drill.proxy.fault_plan import Kind as Kind
    from recovery.drill.proxy.fault_plan import Rule as Rule
    from recovery.drill.proxy.fault_plan import Script as Script
    from recovery.drill.proxy.fault_plan import Weather as Weather
    from recovery.drill.proxy.fault_plan import draw as draw
    from recovery.drill.proxy.fault_plan import stormy as stormy
    from recovery.drill.proxy.fault_proxy import FaultProxy as FaultProxy
    from recovery.drill.proxy.ledger import Count as Count
    from recovery.drill.proxy.ledger import RequestEntry as RequestEntry
    from recovery.drill.proxy.s3_requests import Verb as Verb
    from recovery.drill.proxy.s3_requests import group_of as group_of
    from recovery.drill.report.drill_report import DrillReport as DrillReport
    from recovery.drill.run.runner import run_drill as run_drill
    from recovery.drill.run.strike_schedule import Strike as Strike

# public name -> the module it lives in
_EXPORTS: dict[str, str] = {
    "Calm": "recovery.drill.proxy.fault_plan",
    "Chance": "recovery.drill.proxy.fault_plan",
    "Count": "recovery.drill.proxy.ledger",
    "DrillFault": "recovery.drill.run.strike_schedule",
    "DrillJob": "recovery.drill.jobs.drill_job",
    "DrillReport": "recovery.drill.report.drill_report",
    "Facts": "recovery.drill.proxy.fault_plan",
    "Fault": "recovery.drill.proxy.fault_plan",
    "FaultPlan": "recovery.drill.proxy.fault_plan",
    "FaultProxy": "recovery.drill.proxy.fault_proxy",
    "FirstOf": "recovery.drill.proxy.fault_plan",
    "Kind": "recovery.drill.proxy.fault_plan",
    "RequestEntry": "recovery.drill.proxy.ledger",
    "Rule": "recovery.drill.proxy.fault_plan",
    "Script": "recovery.drill.proxy.fault_plan",
    "Strike": "recovery.drill.run.strike_schedule",
    "Verb": "recovery.drill.proxy.s3_requests",
    "Weather": "recovery.drill.proxy.fault_plan",
    "draw": "recovery.drill.proxy.fault_plan",
    "group_of": "recovery.drill.proxy.s3_requests",
    "run_drill": "recovery.drill.run.runner",
    "stormy": "recovery.drill.proxy.fault_plan",
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
