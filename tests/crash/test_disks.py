"""Whatever a disk has lost after a power cut, and whatever operation failed: a job comes back."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.crash.continuous_life import ContinuousKind, lived_continuous, try_continuous
from tests.crash.cuts import check_of, try_cuts
from tests.crash.disk import Op, after_a_cut
from tests.crash.failures import FailsFrom, try_failures
from tests.crash.life import Kind, Life, lived
from tests.crash.run import SIDES
from tests.crash.sides import check_rewind, check_spill, recorded_rewind, recorded_spill
from tests.crash.sink import try_sink

pytestmark = pytest.mark.full  # a disk is cut at hundreds of places

SYNCHRONOUS, ASYNCHRONOUS = Kind(), Kind(files=True, asynchronous=True)
STEPS = {
    "temporary file of the store",
    "record",
    "large slice",
    "base upload",
    "history",
    "clean-up",
    "directory and pointer",
    "RocksDB",
    "local delta",
    "local sweep",
    "base checkpoint",
}

CONTINUOUS_STEPS = {
    "job",
    "clone",
    "savepoint",
    "local copies",
    "staged output",
    "output",
    "what callers know",
}


def what_is(root: Path) -> dict[str, bytes | None]:
    found = [path for path in root.rglob("*") if not path.name.startswith(("LOG", "OPTIONS-"))]
    found = [path for path in found if not path.is_socket()]  # the one of the process's stores
    return {str(p.relative_to(root)): None if p.is_dir() else p.read_bytes() for p in found}


@pytest.mark.parametrize("kind", [SYNCHRONOUS, ASYNCHRONOUS], ids=str)
def test_what_was_recorded_is_what_lies_on_the_disk(tmp_path: Path, kind: Kind) -> None:
    life = lived(tmp_path / "life", kind)
    assert after_a_cut(life.ops) == what_is(tmp_path / "life")
    assert {op.step for op in life.ops} >= STEPS | ({"download of a base"} if kind.files else set())


@pytest.mark.parametrize("kind", [SYNCHRONOUS, ASYNCHRONOUS], ids=str)
def test_after_a_power_cut_nothing_that_was_acknowledged_is_lost_or_wrong(
    tmp_path: Path, kind: Kind
) -> None:
    life = lived(tmp_path / "life", kind)
    # Of every cut, one in so many; `python -m tests.crash` tries them all.
    tried = try_cuts(life.ops, check_of(life), tmp_path / "cuts", share=(7, 401))
    assert not tried.violations, "\n".join(tried.violations)
    assert tried.images > 10


def without_syncs(life: Life, of: str) -> Life:
    """The same life of code that does not sync those files or folders."""

    def dropped(op: Op) -> bool:
        return op.kind == "sync" and of in op.path

    committed = [(at - sum(map(dropped, life.ops[:at])), epoch) for at, epoch in life.committed]
    return Life([op for op in life.ops if not dropped(op)], life.kind, committed)


@pytest.mark.parametrize("of", ["store/log", "store/.tmp/"])
def test_a_store_that_forgets_a_sync_is_found_out(tmp_path: Path, of: str) -> None:
    life = without_syncs(lived(tmp_path / "life", SYNCHRONOUS, epochs=2), of)
    tried = try_cuts(life.ops, check_of(life), tmp_path / "cuts", share=(1, 151))
    assert tried.violations


def test_after_a_rewind_was_cut_spark_repeats_exactly_that_batch(tmp_path: Path) -> None:
    (tmp_path / "life").mkdir()
    recorder, first = recorded_rewind(tmp_path / "life")
    tried = try_cuts(recorder.ops, check_rewind, tmp_path / "cuts", first=first)
    assert not tried.violations, "\n".join(tried.violations)
    assert tried.operations["rewind"] == 4  # two files get hidden names, which go at the end


def test_a_rewind_in_the_other_order_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "life").mkdir()
    recorder, first = recorded_rewind(tmp_path / "life")
    taken_back = recorder.ops[first:]
    assert [op.kind for op in taken_back] == ["rename", "rename", "unlink", "unlink"]
    image = after_a_cut([*recorder.ops[:first], taken_back[1]])
    # A start that looks is not misled by it either; Spark alone would skip the batch.
    assert "location/offsets/4" in image
    assert "location/commits/3" not in image
    check_rewind(image, tmp_path / "again", 0)


def test_what_a_killed_process_has_spilled_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "life").mkdir()
    recorder, first = recorded_spill(tmp_path / "life")
    tried = try_cuts(recorder.ops, check_spill, tmp_path / "cuts", first=first)
    assert not tried.violations, "\n".join(tried.violations)


@pytest.mark.parametrize(
    ("name", "parts"), [("operator state", 151), ("savepoint", 151), ("erase", 101)]
)
def test_lists_maps_savepoints_and_erased_jobs_are_whole_after_any_cut(
    tmp_path: Path, name: str, parts: int
) -> None:
    record, check = SIDES[name]
    (tmp_path / "life").mkdir()
    recorder, first = record(tmp_path / "life")
    tried = try_cuts(recorder.ops, check, tmp_path / "cuts", first=first, share=(5, parts))
    assert not tried.violations, "\n".join(tried.violations)
    assert tried.images > 10


def test_a_list_that_was_not_synced_is_found_out(tmp_path: Path) -> None:
    record, check = SIDES["operator state"]
    (tmp_path / "life").mkdir()
    recorder, _ = record(tmp_path / "life")
    ops = [op for op in recorder.ops if op.kind != "sync" or "store/" not in op.path]
    assert try_cuts(ops, check, tmp_path / "cuts", share=(1, 31)).violations


@pytest.mark.parametrize("kind", [ContinuousKind(), ContinuousKind(files=True)], ids=str)
def test_a_continuous_job_goes_on_exactly_after_any_cut(
    tmp_path: Path, kind: ContinuousKind
) -> None:
    life = lived_continuous(tmp_path / "life", kind)
    assert after_a_cut(life.ops) == what_is(tmp_path / "life")
    assert {op.step for op in life.ops} == CONTINUOUS_STEPS
    (tmp_path / "cuts").mkdir()
    tried = try_continuous(life, tmp_path / "cuts", share=(7, 901))
    assert not tried.violations, "\n".join(tried.violations)
    assert tried.images > 10


@pytest.mark.parametrize("of", ["out/_statebackend", "store/job/log"])
def test_a_continuous_job_whose_sink_or_store_forgets_a_sync_is_found_out(
    tmp_path: Path, of: str
) -> None:
    life = lived_continuous(tmp_path / "life", ContinuousKind())
    life.ops = [op for op in life.ops if op.kind != "sync" or not op.path.startswith(of)]
    (tmp_path / "cuts").mkdir()
    assert try_continuous(life, tmp_path / "cuts", share=(1, 251)).violations


@pytest.mark.parametrize("kind", [SYNCHRONOUS, ASYNCHRONOUS], ids=str)
def test_a_disk_that_fails_or_is_full_costs_an_attempt_and_no_more(
    tmp_path: Path, kind: Kind
) -> None:
    failed = try_failures(kind, tmp_path, share=(11, 97))
    assert not failed.violations, "\n".join(failed.violations)
    assert set(failed.errors) <= {"SB2002", "SB4002", "SB6001"}


def test_a_sink_of_files_whose_disk_fails_at_any_operation_loses_nothing(tmp_path: Path) -> None:
    failed = try_sink(tmp_path, share=(1, 3))  # the second one syncs a folder that was just made
    assert not failed.violations, "\n".join(failed.violations)
    assert set(failed.errors) == {"SB2004"}
    assert failed.failures > 30


def test_a_sync_that_fails_is_never_taken_for_done(tmp_path: Path) -> None:
    paths: list[str] = []

    def first_sync_of_the_log(kind: str, path: str) -> OSError | None:
        if kind != "sync" or path != "store/log":
            return None
        paths.append(path)
        return OSError(errno.EIO, "broken", path) if len(paths) == 3 else None

    life = lived(tmp_path / "life", SYNCHRONOUS, first_sync_of_the_log, epochs=2)
    assert [error.code for error in life.refused] == ["SB4002"]


def test_a_plan_of_failures_counts_what_it_was_asked(tmp_path: Path) -> None:
    plan = FailsFrom(1, errno.ENOSPC, 2)
    found = [plan("write", path) for path in "abcd"]
    assert [error and error.errno for error in found] == [None, errno.ENOSPC, errno.ENOSPC, None]
    assert (plan.asked, plan.first) == (4, "write b")
