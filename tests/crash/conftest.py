"""Disks of these tests lie in memory, as the simulated ones do."""

from tests.recovery.conftest import tmp_path

__all__ = ["tmp_path"]
