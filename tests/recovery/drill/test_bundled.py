"""The bundled jobs: their input is a function of the seed, their truth counts every row once."""

from __future__ import annotations

from pathlib import Path

import pytest

from recovery.drill.jobs.bundled_jobs import BUNDLED
from recovery.drill.jobs.input_files import ROWS


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "in").iterdir())}


@pytest.mark.parametrize("name", BUNDLED)
def test_the_same_seed_feeds_the_same_input_and_another_one_another(
    tmp_path: Path, name: str
) -> None:
    feed = BUNDLED[name].feed
    assert feed is not None
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        for number in range(3):
            feed(tmp_path / folder, number, seed)
    assert content(tmp_path / "a") == content(tmp_path / "b") != content(tmp_path / "c")
    times = [path.stat().st_mtime for path in sorted((tmp_path / "a" / "in").iterdir())]
    assert times == sorted(set(times)), "Spark reads them in this order"


@pytest.mark.parametrize("name", BUNDLED)
def test_the_truth_counts_every_row_of_the_input_once(tmp_path: Path, name: str) -> None:
    job = BUNDLED[name]
    assert job.feed is not None
    for number in range(8):
        job.feed(tmp_path, number, 5)
    truth = list(job.truth(tmp_path))
    if name == "running-totals":
        assert sorted(row[1] for row in truth) == list(range(8 * ROWS))
        assert max(row[2] for row in truth) < 8 * ROWS
    elif name == "timers":
        assert 0 < sum(row[2] for row in truth) < 8 * ROWS, "late rows and open windows are not in"
        assert len({row[:2] for row in truth}) == len(truth)
    elif name == "continuous-windows":
        assert sum(row[2] for row in truth) == 8 * ROWS, "none is late, and all windows close"
        assert len({row[:2] for row in truth}) == len(truth)
    else:
        assert sum(row[1] for row in truth) == 8 * ROWS
