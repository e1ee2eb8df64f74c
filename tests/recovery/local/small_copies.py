"""Small local copies of one operator, on a clock that a test moves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from recovery.local.local_copies import LocalSubtask
from recovery.local.store_pool import Clock
from statebackend.keygroups import KeyGroupRange
from statebackend.rocks.store import Marker, RocksSettings
from tests.recovery.driver import new_id

GROUPS = KeyGroupRange(0, 7)
ROOT = Path(__file__).parents[3]
SMALL = RocksSettings(block_cache_bytes=1 << 20, write_buffer_bytes=1 << 20)


class FakeClock(Clock):
    """Sleeping takes no time; `meanwhile` happens during the sleep of that number."""

    def __init__(self, meanwhile: dict[int, Callable[[], Any]] | None = None) -> None:
        self.time_s = 100.0
        self.sleeps = 0
        self.meanwhile = meanwhile or {}
        super().__init__(lambda: self.time_s, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.time_s += seconds
        self.sleeps += 1
        self.meanwhile.get(self.sleeps, lambda: None)()


def subtask(
    path: Path, *, clock: Clock | None = None, operator: str = "op", number: int = 0
) -> LocalSubtask:
    return LocalSubtask(
        str(path),
        job="job",
        operator=operator,
        key_groups=KeyGroupRange(8 * number, 8 * number + 7),
        new_id=new_id,
        clock=clock or FakeClock(),
    )


def marker(epoch: int, chain: str = "aa") -> Marker:
    return Marker(
        job_id="job-0", operator="op", key_group_start=0, key_group_end=7, epoch=epoch, chain=chain
    )


def filled(local: LocalSubtask, value: bytes = b"1", epoch: int = 0) -> str:
    """Make a store directory that holds something and let it go; its name."""
    held = local.create()
    held.open_store(SMALL).apply([b"\0\0k"], [value], marker(epoch))
    held.release()
    return held.path.name


def directories(local: LocalSubtask) -> set[str]:
    return {path.name for path in local.path.iterdir() if path.is_dir()}
