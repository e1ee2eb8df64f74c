"""The job that docs/quality/drills.md shows is what it says, and can be drilled."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from pyspark.sql import Row

from recovery.drill.jobs.drill_job import DrillJob
from recovery.drill.jobs.named_functions import address_of, load
from recovery.drill.report.drill_report import DrillReport
from statebackend.testing.processor_tester import ProcessorTester

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "quality" / "drills.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "clicks_drill.py"
    path.write_text(BLOCKS[0], encoding="utf-8")
    return path


@pytest.fixture
def module(file: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "clicks_drill", raising=False)
    job = load(f"{file}:JOB")
    assert isinstance(job, DrillJob)
    return sys.modules["clicks_drill"]


def test_the_page_has_the_job_a_script_and_a_test() -> None:
    assert len(BLOCKS) == 4
    for block in BLOCKS:
        compile(block, "docs/quality/drills.md", "exec")


def test_the_job_s_functions_are_found_by_another_process(module: ModuleType, file: Path) -> None:
    found = address_of(module.JOB.build)
    assert found.name == "clicks_drill:build"
    assert found.folder in ("", str(file.parent))


def test_the_job_s_truth_counts_what_its_feed_wrote(module: ModuleType, tmp_path: Path) -> None:
    for number in range(3):
        module.feed(tmp_path, number, 7)
    files = sorted((tmp_path / "clicks").iterdir())
    assert [path.name for path in files] == ["000000.json", "000001.json", "000002.json"]
    lines = [line for path in files for line in path.read_text().splitlines()]
    users = Counter(json.loads(line)["user"] for line in lines)
    assert sorted(module.truth(tmp_path)) == sorted(users.items())
    assert users.total() == 600


def test_the_same_seed_writes_the_same_input(module: ModuleType, tmp_path: Path) -> None:
    texts = []
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        folder = tmp_path / name
        folder.mkdir()
        module.feed(folder, 1, seed)
        texts.append((folder / "clicks" / "000001.json").read_text())
    assert texts[0] == texts[1] != texts[2]


def test_the_job_s_processor_counts(module: ModuleType) -> None:
    tester = ProcessorTester(module.Clicks())
    assert [row.n for row in tester.test("ann", [Row(user="ann")] * 3)] == [3]
    assert [row.n for row in tester.test("ann", [Row(user="ann")])] == [4]


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_the_job_is_exact_after_an_executor_was_killed(file: Path, tmp_path: Path) -> None:
    report = tmp_path / "report"
    words = [sys.executable, "-m", "statebackend.cli", "drill", "run", f"{file}:JOB"]
    words += ["--faults", "executor-killed", "--at-epoch", "2", "--report", str(report)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=540, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("Exact: 20 rows, ")
    found = msgspec.json.decode((report / "report.json").read_bytes(), type=DrillReport)
    assert [one.fault for one in found.faults] == ["executor-killed"]
    assert len(found.epochs) >= 12
