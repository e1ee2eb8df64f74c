"""A worker's own folder in a `local_dir`: whoever deletes or sweeps what, files in use stay."""

from __future__ import annotations

import fcntl
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recovery.local.workspace import Workspace
from tests.recovery.driver import new_id


def test_a_process_whose_folder_was_deleted_makes_another(tmp_path: Path) -> None:
    work = Workspace(str(tmp_path / "local"), new_id)
    work.path().write_bytes(b"rows")
    shutil.rmtree(tmp_path / "local")
    file = work.path()
    file.write_bytes(b"rows")
    Workspace(str(tmp_path / "local"), new_id).path()
    assert file.exists(), "it holds the lease there"


def test_a_process_whose_lease_alone_was_deleted_keeps_its_folder(tmp_path: Path) -> None:
    work = Workspace(str(tmp_path), new_id)
    file = work.path()
    file.write_bytes(b"rows")
    (file.parent / "lease").unlink()
    assert work.path().parent == file.parent
    Workspace(str(tmp_path), new_id).path()
    assert file.exists(), "it holds the lease again"


def test_threads_of_a_process_share_one_folder(tmp_path: Path) -> None:
    for round_ in range(20):
        work = Workspace(str(tmp_path / str(round_)), new_id)
        start = threading.Barrier(4)

        def ask(work: Workspace = work, start: threading.Barrier = start) -> Path:
            start.wait()
            return work.path()

        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(ask) for _ in range(4)]
            assert len({one.result().parent for one in asked}) == 1


def test_a_folder_that_was_swept_and_made_anew_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Workspace(str(tmp_path), new_id).path().parent
    flock = fcntl.flock

    def overtaken(lease: int, how: int) -> None:
        monkeypatch.undo()
        (own / "lease").unlink()
        (own / "lease").touch()  # another process has swept it, and this one has it again
        flock(lease, how)

    (own / "lease").rename(own / "before")  # so that nobody holds the one that is opened
    monkeypatch.setattr(fcntl, "flock", overtaken)
    Workspace(str(tmp_path), new_id).path()
    assert (own / "lease").exists()
