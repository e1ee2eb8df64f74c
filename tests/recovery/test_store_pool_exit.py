"""A process that keeps stores open ends in order."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_PROGRAM = """
import sys, time
from pathlib import Path
from recovery.local.store_pool import StorePool, StorePoolSettings
from recovery.local.store_pool import Clock

class Held:
    bad = recent = store = None
    unflushed_epochs = 0
    def __init__(self, path): self.path = path
    def say_holder(self, door): pass
    def release(self): print("released", flush=True)

folder = Path(sys.argv[1])
clock = Clock(time.monotonic, time.sleep)
store_pool = StorePool.of_process(clock, StorePoolSettings(), lambda: folder / "door")
store_pool.keep(Held(folder / "a" / "b" / "c" / "d" / "e"))
"""


def test_what_it_keeps_is_let_go_before_the_interpreter_ends(tmp_path: Path) -> None:
    """Else a thread that comes back from RocksDB then aborts the process."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "released\n", "")
    assert not (tmp_path / "door").exists()
