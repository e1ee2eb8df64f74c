"""Holes in what the simulations reach are told by function and source line."""

from __future__ import annotations

from tests.sim.reach import Hole, holes_of

SOURCE = """\
def outer(n):
    if n:
        n += 1
    return n


class Log:
    def read(self):
        for one in ():
            print(one)
"""


def test_a_line_and_a_way_that_were_not_taken_are_told_by_their_function() -> None:
    known = {"missing_lines": [10], "missing_branches": [[2, 4], [9, 10], [9, -8]]}
    assert holes_of("a.py", SOURCE, known) == [
        Hole("a.py", "Log.read", 9, "for one in (): -> its end", -8),
        Hole("a.py", "Log.read", 10, "print(one)"),
        Hole("a.py", "outer", 2, "if n: -> return n", 4),
    ]


def test_a_way_out_of_a_line_that_was_not_reached_is_not_told_twice() -> None:
    known = {"missing_lines": [2, 3], "missing_branches": [[2, 3], [2, 4]]}
    assert [hole.line for hole in holes_of("a.py", SOURCE, known)] == [2, 3]
