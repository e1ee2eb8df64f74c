"""The simulation's own files: what one world leaves behind does nothing to the next."""

from __future__ import annotations

import pytest

from tests.sim.files import Disk


def test_a_world_that_is_over_cannot_close_what_another_has_open() -> None:
    over, now = Disk(), Disk()
    left = over.os.open("/lease", over.os.O_RDWR | over.os.O_CREAT)
    held = now.os.open("/lease", now.os.O_RDWR | now.os.O_CREAT)
    now.fcntl.flock(held, now.fcntl.LOCK_EX | now.fcntl.LOCK_NB)
    now.os.close(left)  # by the garbage collector, from a generator of that world
    other = now.os.open("/lease", now.os.O_RDWR)
    with pytest.raises(BlockingIOError):
        now.fcntl.flock(other, now.fcntl.LOCK_EX | now.fcntl.LOCK_NB)
    now.os.close(held)
    with pytest.raises(OSError, match="Bad file descriptor"):
        now.os.close(held)
    now.fcntl.flock(other, now.fcntl.LOCK_EX | now.fcntl.LOCK_NB)
