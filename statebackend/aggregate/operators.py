"""The processor of a plan."""

from __future__ import annotations

from statebackend.aggregate.plan import AggregatePlan
from statebackend.aggregate.processor import (
    AggregateProcessor,
    TotalsProcessor,
)
from statebackend.aggregate.sessions import SessionsProcessor
from statebackend.aggregate.windowed import WindowsProcessor

__all__ = ["processor_for"]


def processor_for(plan: AggregatePlan, *, partial: bool = False) -> AggregateProcessor:
    """The processor that runs a plan.

    Args:
        plan: what `plan_aggregate` gave.
        partial: its batches are what a `PartialAggregation` made, not input rows.
    """
    if plan.window is None:
        return TotalsProcessor(plan, partial=partial)
    if plan.window.kind == "session":
        return SessionsProcessor(plan, partial=partial)
    return WindowsProcessor(plan, partial=partial)
