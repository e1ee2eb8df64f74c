"""Making a frame leaves the caller's classes as they are: a notebook goes on defining things."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full  # starts a Spark of its own


def test_a_frame_leaves_classes_alone_and_the_next_one_sees_a_helper_defined_anew(
    tmp_path: Path,
) -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("notebook.py")), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-30_000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["changed"] == []
    assert found["new names"] == []
    assert found["globals"] is True
    assert (found["calls"], found["kept"]) == ([], 0)  # the rehearsal's are its own
    assert found["first"] == [30]
    assert found["second"] == [20030]
    assert (found["tested"], found["tested again"]) == ([["a", 20]], [["a", 10020]])
    assert found["changed by a tester"] == []
    assert found["counted"] == 1
