"""Checks on the driver how Spark plans an operator, before anything is started.

An operator needs each row in the partition of its subtask's anchor rows, and a hash join that emits
the barrier last. :mod:`statebackend.spark.frames.anchor` writes the plan so that Spark keeps to
that. If a setting, an extension or a release does not, this check finds it, and not a task that
misses its barrier.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from statebackend.errors import PlanError
from statebackend.spark.session_settings import set_for_a_while

__all__ = ["check_plan", "misplanned"]

_log = logging.getLogger("statebackend.spark")
_OPERATOR: Final = "MapInArrow"
_JOIN: Final = re.compile(r"ShuffledHashJoin .*RightOuter, BuildRight")
_OTHER_JOINS: Final = (
    "ShuffledHashJoin",  # from the other side
    "SortMergeJoin",
    "BroadcastHashJoin",
    "BroadcastNestedLoopJoin",
)
_ANCHOR: Final = "InMemoryTableScan"
_PARTITIONS: Final = "spark.sql.shuffle.partitions"
# The check reads the plan as text, and a session may have that text cut short.
_FIELDS: Final = "spark.sql.debug.maxToStringFields"
_FIELDS_MIN: Final = 1000
_LENGTH: Final = "spark.sql.maxPlanStringLength"
_LENGTH_MAX: Final = (1 << 31) - 16
_LINE: Final = re.compile(r"([ :]*)([:+]- )?(?:\*\(\d+\) |\* )?((\w+).*)")
_EXCHANGED: Final = re.compile(r"Exchange (?:SinglePartition|hashpartitioning\(.*, (\d+)\))")


@dataclass(frozen=True)
class _Node:
    name: str
    text: str
    depth: int


def misplanned(plan: str, parallelism: int) -> str | None:
    """What is wrong with an operator's physical plan; None where nothing is known to be.

    Args:
        plan: as ``explain()`` prints it, with the operator at its top.
    """
    nodes = _nodes(plan)
    top = next((n for n, node in enumerate(nodes) if node.name == _OPERATOR), len(nodes))
    at = top + 1
    while at < len(nodes) and nodes[at].name in ("Project", "Filter", "ColumnarToRow"):
        at += 1
    if at >= len(nodes):
        return None
    join = nodes[at]
    if join.name == "Exchange":
        return f"shuffles its rows again after they were placed ({_shown(join)})"
    if join.name in _OTHER_JOINS and not _JOIN.match(join.text):
        return f"joins its rows with the anchor by {join.name}, which may emit the barrier too soon"
    if not _JOIN.match(join.text):
        return None  # an extension's own node, which is not known here
    sides = [n for n in range(at + 1, len(nodes)) if nodes[n].depth == join.depth + 1][:2]
    for side, what in zip(sides, ("rows", "anchor"), strict=False):
        found = _partitions(nodes, side)
        if found is not None and found != parallelism:
            return f"shuffles its {what} to {found} partition(s) instead of {parallelism}"
    return None


def _partitions(nodes: list[_Node], side: int) -> int | None:
    """How many partitions a join's side is shuffled to; None: it is not, or it is not known."""
    for n, node in enumerate(nodes[side:]):
        if node.name == _ANCHOR or (n and node.depth <= nodes[side].depth):
            return None  # the side is over, or lies as it was cached
        if node.name == "Exchange":
            found = _EXCHANGED.match(node.text)
            return int(found[1] or 1) if found else None
    return None


def _nodes(plan: str) -> list[_Node]:
    found = []
    for line in plan.splitlines():
        match = _LINE.fullmatch(line)
        if match:
            depth = len(match[1]) // 3 + bool(match[2])
            found.append(_Node(match[4], match[3], depth))
    return found


def _shown(node: _Node) -> str:
    return node.text.partition(", [plan_id")[0][:200]


def check_plan(frame: DataFrame, uid: str, parallelism: int) -> None:
    """Refuse an operator that Spark would plan so that its subtasks miss rows or their barrier.

    Args:
        frame: the operator's output. Its session must be set as it will be for the query.

    Raises:
        PlanError: with what is wrong, and the setting that does it if one does.
    """

    def look() -> str | None:
        try:
            return misplanned(_explained(frame), parallelism)
        except (Py4JError, PySparkException) as error:  # the query's own error will say it
            _log.debug("the plan of operator %r cannot be looked at (%s)", uid, error)
            return None

    wrong = look()
    if wrong is None:
        return
    blamed = _blamed(frame.sparkSession, look, parallelism)
    raise PlanError(
        f"Spark's plan of operator {uid!r} {wrong}, so its subtasks could not take part in a batch."
        + (f" The setting {blamed} does that." if blamed else ""),
        todo=f"Change {blamed.partition(' = ')[0]} and start the query again."
        if blamed
        else "Report this with the plan (df.explain()), the session's settings and its extensions.",
    )


def _explained(frame: DataFrame) -> str:
    session, jdf = frame.sparkSession, frame._jdf
    jvm: Any = session._jvm
    # As explain() does, which prints it: a streaming frame is planned as its first batch would be.
    with contextlib.ExitStack() as whole:
        shown = max(int(session.conf.get(_FIELDS) or 0), _FIELDS_MIN)
        for name, value in ((_FIELDS, shown), (_LENGTH, _LENGTH_MAX)):
            whole.enter_context(set_for_a_while(session, name, str(value)))
        return str(jvm.PythonSQLUtils.explainString(jdf.queryExecution(), "simple"))


def _blamed(session: SparkSession, look: Callable[[], str | None], parallelism: int) -> str | None:
    """The setting without which the plan is right; None: no single one is to blame."""
    settings = {
        name: value
        for name, value in session.conf.getAll.items()
        if name.startswith("spark.sql.") and session.conf.isModifiable(name)
    }
    wanted: list[tuple[str, str | None]] = [(name, None) for name in sorted(settings)]
    for name, value in [*wanted, (_PARTITIONS, str(parallelism))]:
        said = session.conf.get(name)
        with contextlib.suppress(PySparkException), set_for_a_while(session, name, value):
            if look() is None:
                return f"{name} = {said}"
    return None
