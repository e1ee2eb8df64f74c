"""Faults on purpose: what a job must survive, made to happen and counted.

`FaultProxy` stands between S3 clients and an S3 server. What it does to which request is decided by
a `FaultPlan`: a pure function of a seed and of the facts of the request.
"""

from __future__ import annotations

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

__all__ = [
    "Calm",
    "Chance",
    "Count",
    "Facts",
    "Fault",
    "FaultPlan",
    "FaultProxy",
    "FirstOf",
    "Kind",
    "RequestEntry",
    "Rule",
    "Script",
    "Verb",
    "Weather",
    "draw",
    "group_of",
    "stormy",
]
