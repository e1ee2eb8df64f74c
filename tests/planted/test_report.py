"""The tables say what was caught by whom, and what was not."""

from __future__ import annotations

from collections import Counter

from tests.planted.finding import Found, simulation
from tests.planted.report import bugs_table, faults_table
from tests.support.faults import Fault


def test_what_nobody_caught_and_who_was_not_meant_to_show() -> None:
    of = simulation("content")
    (bug,) = of.bugs.values()
    caught = bugs_table([(of, bug, Found(3, "references", "gone"))])
    assert f"| content | {bug.name} | {bug.what} | references | 3 | 1 |" in caught
    assert "1 of 1 caught. content: references 1." in caught
    assert "| **nobody** |  |" in bugs_table([(of, bug, None)])
    assert "liveness (**not meant to**)" in bugs_table([(of, bug, Found(3, "liveness", "stuck"))])


def test_a_fault_is_counted_where_it_struck() -> None:
    table = faults_table({"sim": Counter({Fault.WORKER_KILLED: 1234})}, 5)
    assert (
        f"| worker killed | {Fault.WORKER_KILLED.sentence} | 1,234 | yes | worker-killed" in table
    )
    assert f"| driver frozen | {Fault.DRIVER_FROZEN.sentence} |  |  |  |" in table
