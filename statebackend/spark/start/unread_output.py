"""Refuses at its start a query that cuts its output short, or asks for it in a wrong mode."""

from __future__ import annotations

from typing import Any, Final

from statebackend.errors import UnsupportedQueryError
from statebackend.spark.start.stream_writer import is_operator, items

__all__ = ["check_output"]

_LIMITS: Final = ("GlobalLimit", "LocalLimit")
# They read all of their input before they give a row, so a limit above them cuts nothing short.
_WHOLE: Final = ("Sort", "Aggregate", "RepartitionByExpression")


def check_output(plan: Any, mode: str) -> None:
    """Refuse a limit that cuts an operator's output short, and a complete output that is none.

    Args:
        plan: the query's analysed plan, in Spark's JVM. mode: its output mode.

    Raises:
        UnsupportedQueryError: with the way out.
    """
    cut = aggregated = False
    nodes = [(plan, False)]
    while nodes:
        node, limited = nodes.pop()
        name = str(node.getClass().getSimpleName())
        aggregated = aggregated or name == "Aggregate"
        limited = (limited or name in _LIMITS) and name not in _WHOLE
        cut = cut or (limited and is_operator(node))
        nodes.extend((child, limited) for child in items(node.children()))
    if cut:
        raise UnsupportedQueryError(
            "A limit() stands behind an operator of the query. It stops reading early, and a batch "
            "is complete only when all of the operator's output was read.",
            todo="Leave limit() out of the streaming frame; limit in foreachBatch, after "
            "frame.persist() and frame.count().",
        )
    if mode.lower() == "complete" and not aggregated:
        raise UnsupportedQueryError(
            "The query's output mode is complete, which is for aggregations: the operator gives "
            "the rows of each batch, and Spark keeps no earlier ones.",
            todo='Use outputMode("append") or outputMode("update").',
        )
