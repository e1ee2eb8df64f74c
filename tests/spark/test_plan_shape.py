"""The check of a physical plan sees by its text whether an operator can run with it."""

from __future__ import annotations

import re

import pytest

from statebackend.spark.frames.physical_plan import misplanned

TOP = """== Physical Plan ==
MapInArrow SubtaskTask(c0#1, __statebackend_stamp#2)#3, [k#4], false
+- *(3) Project [c0#1, __statebackend_stamp#2]
"""
JOIN = "   +- *(3) ShuffledHashJoin [s#5], [s#6], RightOuter, BuildRight\n"
STREAM = """      :- Exchange hashpartitioning(s#5, 3), REPARTITION_BY_NUM, [plan_id=9]
      :  +- *(1) Project [c0#1]
      :     +- Exchange hashpartitioning(k#4, 200), ENSURE_REQUIREMENTS, [plan_id=8]
      :        +- StreamingRelation FileSource[in], [k#4]
"""
ANCHOR = """      +- Project [s#6]
         +- InMemoryTableScan [s#6]
               +- InMemoryRelation [s#6], StorageLevel(disk, memory, deserialized, 1 replicas)
                     +- Exchange hashpartitioning(s#6, 4), REPARTITION_BY_NUM, [plan_id=7]
                        +- LocalTableScan [s#6]
"""
SHUFFLED = """      +- Exchange hashpartitioning(s#6, 200), ENSURE_REQUIREMENTS, [plan_id=7]
         +- InMemoryTableScan [s#6]
"""


def test_a_plan_with_the_anchor_as_it_lies_is_right() -> None:
    assert misplanned(TOP + JOIN + STREAM + ANCHOR, 3) is None


def test_an_anchor_that_is_not_cached_is_right_in_as_many_partitions() -> None:
    assert misplanned(TOP + JOIN + STREAM + SHUFFLED.replace("200", "3"), 3) is None


@pytest.mark.parametrize(
    ("plan", "wrong"),
    [
        (JOIN + STREAM + SHUFFLED, r"shuffles its anchor to 200 partition\(s\) instead of 3"),
        (JOIN + STREAM.replace("5, 3)", "5, 7)") + ANCHOR, "shuffles its rows to 7"),
        (
            JOIN + STREAM.replace("hashpartitioning(s#5, 3)", "SinglePartition") + ANCHOR,
            "shuffles its rows to 1 ",
        ),
        (JOIN.replace("ShuffledHash", "SortMerge") + STREAM + ANCHOR, "by SortMergeJoin"),
        (JOIN.replace("ShuffledHash", "BroadcastHash") + STREAM + ANCHOR, "by BroadcastHashJoin"),
        (JOIN.replace("BuildRight", "BuildLeft") + STREAM + ANCHOR, "by ShuffledHashJoin"),
        ("   +- Exchange RoundRobinPartitioning(3), REPARTITION_BY_NUM\n", "again after"),
    ],
)
def test_what_is_wrong_is_said(plan: str, wrong: str) -> None:
    found = misplanned(TOP + plan, 3)
    assert found is not None
    assert re.search(wrong, found), found


def test_a_side_that_is_not_shuffled_is_not_blamed_for_the_other() -> None:
    scanned = """      :- *(1) Project [c0#1]
      :  +- Scan [c0#1]
"""
    found = misplanned(TOP + JOIN + scanned + SHUFFLED, 3)
    assert found is not None
    assert "shuffles its anchor to 200 partition(s) instead of 3" in found


@pytest.mark.parametrize(
    "plan",
    [
        "",
        "== Physical Plan ==\norg.apache.spark.sql.AnalysisException: no such thing\n",
        TOP,
        TOP + JOIN.replace("Shuffled", "Accelerated") + STREAM + SHUFFLED,
        TOP + JOIN,
    ],
)
def test_a_plan_that_is_not_understood_is_let_pass(plan: str) -> None:
    assert misplanned(plan, 3) is None
