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
    from recovery.drill.faults.store_faults import Calm as Calm
    from recovery.drill.faults.store_faults import Chance as Chance
    from recovery.drill.faults.store_faults import Facts as Facts
    from recovery.drill.faults.store_faults import Fault as Fault
    from recovery.drill.faults.store_faults import FaultPlan as FaultPlan
    from recovery.drill.faults.store_faults import FirstOf as FirstOf
    from recovery.drill.faults.store_faults import Kind as Kind
    from recovery.drill.faults.store_faults import Rule as Rule
    from recovery.drill.faults.store_faults import Script as Script
    from recovery.drill.faults.store_faults import Weather as Weather
    from recovery.drill.faults.store_faults import draw as draw
    from recovery.drill.faults.store_faults import stormy as stormy
    from recovery.drill.jobs.drill_job import DrillJob as DrillJob
    from recovery.drill.proxy.ledger import Count as Count
    from recovery.drill.proxy.ledger import RequestEntry as RequestEntry
    from recovery.drill.proxy.proxy import FaultProxy as FaultProxy
    from recovery.drill.proxy.s3_requests import Verb as Verb
    from recovery.drill.proxy.s3_requests import group_of as group_of
    from recovery.drill.report.outcome import DrillReport as DrillReport
    from recovery.drill.run.runner import run_drill as run_drill
    from recovery.drill.run.scenario import DrillFault as DrillFault
    from recovery.drill.run.scenario import Strike as Strike

# public name -> the module it lives in
_EXPORTS: dict[str, str] = {
    "Calm": "recovery.drill.faults.store_faults",
    "Chance": "recovery.drill.faults.store_faults",
    "Count": "recovery.drill.proxy.ledger",
    "DrillFault": "recovery.drill.run.scenario",
    "DrillJob": "recovery.drill.jobs.drill_job",
    "DrillReport": "recovery.drill.report.outcome",
    "Facts": "recovery.drill.faults.store_faults",
    "Fault": "recovery.drill.faults.store_faults",
    "FaultPlan": "recovery.drill.faults.store_faults",
    "FaultProxy": "recovery.drill.proxy.proxy",
    "FirstOf": "recovery.drill.faults.store_faults",
    "Kind": "recovery.drill.faults.store_faults",
    "RequestEntry": "recovery.drill.proxy.ledger",
    "Rule": "recovery.drill.faults.store_faults",
    "Script": "recovery.drill.faults.store_faults",
    "Strike": "recovery.drill.run.scenario",
    "Verb": "recovery.drill.proxy.s3_requests",
    "Weather": "recovery.drill.faults.store_faults",
    "draw": "recovery.drill.faults.store_faults",
    "group_of": "recovery.drill.proxy.s3_requests",
    "run_drill": "recovery.drill.run.runner",
    "stormy": "recovery.drill.faults.store_faults",
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
