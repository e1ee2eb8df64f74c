"""A test of Spark's that fails is known by its name and by what it says, or it is a defect."""

from __future__ import annotations

import unittest
import zipfile
from pathlib import Path

import pyspark
import pytest

from tests.spark_suites import run
from tests.spark_suites.known_failures import Known

REASON = "it reads what is not there"
KNOWN = (Known(("test_known", "test_known_that_passes"), "internals", REASON, "[NOT_THERE]"),)


def sparks_tests() -> type[unittest.TestCase]:
    """As Spark writes them; in a function, where pytest does not find them."""

    class Spark(unittest.TestCase):
        def test_passes(self) -> None:
            pass

        def test_known(self) -> None:
            raise KeyError("[NOT_THERE] of Spark's")

        def test_known_that_passes(self) -> None:
            pass

        def test_known_with_another_failure(self) -> None:
            raise KeyError("ours")

        def test_other(self) -> None:
            raise AssertionError("not so")

        def test_part(self) -> None:
            for part in (1, 2):
                with self.subTest(part=part):
                    assert part == 1

        @unittest.skip("by Spark")
        def test_skipped(self) -> None:
            pass

    return Spark


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("test_passes", "passed"),
        ("test_known", "internals"),
        ("test_known_that_passes", "defect"),
        ("test_known_with_another_failure", "defect"),
        ("test_other", "defect"),
        ("test_part", "defect"),
        ("test_skipped", "skipped"),
    ],
)
def test_each_outcome_has_its_kind(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = (*KNOWN, Known(("test_known_with_another_failure",), "difference", "x", "[OTHER]"))
    monkeypatch.setattr(run, "KNOWN", known)
    recorder = run.Recorder("suite")
    sparks_tests()(name).run(recorder)
    assert [one.kind for one in recorder.outcomes] == [kind]
    assert f"{kind:10} suite {name}" in capsys.readouterr().out


def test_the_table_counts_by_suite_and_says_why() -> None:
    outcomes = [
        run.Outcome("one", "a", "passed", "", 1.0),
        run.Outcome("one", "b", "internals", REASON, 1.0),
        run.Outcome("two", "b", "internals", REASON, 1.0),
    ]
    lines = run.table(outcomes).splitlines()
    assert "| one | 1 | 0 | 1 | 0 | 0 |" in lines
    assert "| all | 1 | 0 | 2 | 0 | 0 |" in lines
    assert f"| 2 | internals | {REASON} |" in lines


def test_every_module_of_sparks_tests_is_run() -> None:
    package = Path(pyspark.__file__).parent / "python" / "lib" / "pyspark.zip"
    folder = "pyspark/sql/tests/pandas/streaming/test_"
    with zipfile.ZipFile(package) as held:
        names = [name for name in held.namelist() if name.startswith(folder)]
    assert names
    assert {f"streaming.{Path(name).stem}" for name in names} <= set(run.SUITES)
