"""Refuses at its start a query that cuts its output short, or asks for it in a wrong mode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from statebackend.errors import UnsupportedQueryError
from statebackend.runtime.driver.operator_specs import Operator
from statebackend.spark.start.writer_inspection import is_operator, items, nodes_of, uid_in

__all__ = ["check_output"]

_LIMITS: Final = ("GlobalLimit", "LocalLimit")
# They read all of their input before they give a row, so a limit above them cuts nothing short.
_WHOLE: Final = ("Sort", "Aggregate", "RepartitionByExpression")


def check_output(plan: Any, mode: str, operators: Iterable[Operator]) -> None:
    """Refuse a limit that cuts an operator's output short, and output modes that mean nothing.

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
    _check_functions(plan, mode.lower(), {one.uid: one.output_mode for one in operators})


def _check_functions(plan: Any, mode: str, modes: dict[str, str]) -> None:
    """Refuse for functions of ``applyInPandasWithState`` what Spark refuses for its own.

    Args:
        modes: that they were asked for with, by uid.
    """
    if not any(modes.values()):
        return
    aggregated = any(map(_is_aggregate, nodes_of(plan)))
    for node in nodes_of(plan):
        uid = uid_in(node) if is_operator(node) else ""
        wanted = modes.get(uid, "")
        if wanted and not aggregated and wanted != mode:
            raise UnsupportedQueryError(
                f"Operator {uid!r} is an applyInPandasWithState in {wanted} mode, and the query's "
                f"output mode is {mode}.",
                todo=f'Use outputMode("{wanted}"), or give applyInPandasWithState "{mode}".'
                if mode in ("append", "update")
                else f'Use outputMode("{wanted}").',
            )
        if wanted == "update" and aggregated:
            raise UnsupportedQueryError(
                f"Operator {uid!r} is an applyInPandasWithState in update mode, in a query with an "
                f"aggregation.",
                todo='Give applyInPandasWithState "append", or leave the aggregation out.',
            )
        if wanted and any(map(_is_aggregate, nodes_of(node))):
            raise UnsupportedQueryError(
                f"Operator {uid!r} is an applyInPandasWithState behind an aggregation.",
                todo="As in Spark, put the aggregation behind it.",
            )


def _is_aggregate(node: Any) -> bool:
    return str(node.getClass().getSimpleName()) == "Aggregate" and bool(node.isStreaming())
