"""Faults on purpose: what a job must survive, made to happen and counted.

`run_drill` runs a job on real processes, strikes it, and checks what it has put out.

`FaultProxy` stands between S3 clients and an S3 server. What it does to which request is decided by
a `FaultPlan`: a pure function of a seed and of the facts of the request.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from recovery.drill.faults import (
    Calm,
    Chance,
    Facts,
    Fault,
    FaultPlan,
    FirstOf,
    Kind,
    Rule,
    Script,
    Weather,
    draw,
    stormy,
)
from recovery.drill.ledger import Count, RequestEntry
from recovery.drill.proxy import FaultProxy
from recovery.drill.s3 import Verb, group_of

if TYPE_CHECKING:
    from recovery.drill.outcome import DrillReport as DrillReport
    from recovery.drill.runner import run_drill as run_drill
    from recovery.drill.scenario import DrillFault as DrillFault
    from recovery.drill.scenario import DrillJob as DrillJob
    from recovery.drill.scenario import Strike as Strike

# What a proxy alone does not need is imported when it is asked for.
_LATER = {
    "DrillFault": "recovery.drill.scenario",
    "DrillJob": "recovery.drill.scenario",
    "DrillReport": "recovery.drill.outcome",
    "Strike": "recovery.drill.scenario",
    "run_drill": "recovery.drill.runner",
}

__all__ = [
    "Calm",
    "Chance",
    "Count",
    "DrillFault",
    "DrillJob",
    "DrillReport",
    "Facts",
    "Fault",
    "FaultPlan",
    "FaultProxy",
    "FirstOf",
    "Kind",
    "RequestEntry",
    "Rule",
    "Script",
    "Strike",
    "Verb",
    "Weather",
    "draw",
    "group_of",
    "run_drill",
    "stormy",
]


def __getattr__(name: str) -> object:
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(module), name)
    globals()[name] = value
    return value
