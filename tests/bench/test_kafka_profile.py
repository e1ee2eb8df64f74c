"""Samples of a profiler, added up by function."""

from __future__ import annotations

from bench.kafka.kafka_profile import shares

RAW = """main (a.py:1);work (a.py:10);inner (b.py:5) 6
main (a.py:1);work (a.py:12) 3
main (a.py:1);malloc (libc.so) 1
"""


def test_a_function_counts_once_a_sample_and_its_lines_together() -> None:
    found = shares(RAW)
    assert found["own"] == [" 60.0% inner (b.py)", " 30.0% work (a.py)", " 10.0% malloc (libc.so)"]
    assert found["with what they call"][:2] == ["100.0% main (a.py)", " 90.0% work (a.py)"]


def test_no_samples_give_no_shares() -> None:
    assert shares("") == {"own": [], "with what they call": []}
