"""Makes the processor that carries out an aggregation plan."""

from __future__ import annotations

from statebackend.operators.aggregate.aggregate_processor import (
    AggregateProcessor,
    TotalsProcessor,
)
from statebackend.operators.aggregate.aggregation_plan import AggregatePlan
from statebackend.operators.aggregate.sessions import SessionsProcessor
from statebackend.operators.aggregate.window_processor import WindowsProcessor

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
