"""Each promise that is broken on purpose can still be broken, and what it breaks still compiles."""

from __future__ import annotations

import pytest

from tests.mutations.promises import BROKEN, BrokenPromise
from tests.mutations.run import ROOT, broken_text, selection


@pytest.mark.parametrize("one", BROKEN, ids=lambda one: one.name)
def test_what_is_to_be_broken_is_there(one: BrokenPromise) -> None:
    compile(broken_text(one), one.path, "exec")
    assert all((ROOT / test).exists() for test in one.tests)


def test_there_are_twenty_and_each_has_a_name_of_its_own() -> None:
    assert len({one.name for one in BROKEN}) == len(BROKEN) >= 20


def test_the_tests_are_those_of_the_readmes_command() -> None:
    assert selection().startswith("not full and not (slow or ")  # with tox's own names filled in
