"""A fixed portion of damaged inputs of each kind; `python -m tests.fuzz` has the millions."""

from __future__ import annotations

import pytest

from tests.fuzz.run import KINDS, fuzzed, kinds
from tests.fuzz.target import Target

SEED, INPUTS = 20_260, 1500


@pytest.fixture(scope="module")
def targets() -> dict[str, Target]:
    return {target.name: target for target in kinds()}


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_refused_by_name_or_means_what_was_written(
    kind: str, targets: dict[str, Target]
) -> None:
    print(f"seed {SEED}, replay: python -m tests.fuzz --kind {kind!r} --seed {SEED}")
    report = fuzzed(targets[kind], SEED, 0, INPUTS)
    assert not report["violations"], "\n".join(report["found"])
    assert set(report["outcomes"]) > {"refused"}, "every input was refused: none was nearly right"


def test_no_kind_is_left_out(targets: dict[str, Target]) -> None:
    assert tuple(targets) == KINDS


def test_a_kind_that_takes_damage_for_sound_is_found_out() -> None:
    def believed(given: int) -> str:
        assert given < 3, "damage went unnoticed"
        return "taken"

    report = fuzzed(Target("numbers", lambda rng: rng.randrange(5), believed), SEED, 0, 50)
    assert report["violations"] == 50 - report["outcomes"]["taken"] > 0
