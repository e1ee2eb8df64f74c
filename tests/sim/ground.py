"""What the jobs of one seed stand on: clock, bucket and hosts, and what is open on those."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.sim.bucket import Bucket, Watcher
from tests.sim.cluster import Host
from tests.sim.disk import Opened, SimKeeper
from tests.sim.files import Disk
from tests.sim.kernel import Scheduler
from tests.sim.places import Folder

__all__ = ["Ground", "JobFolder"]


class Ground:
    """See the module.

    Attributes:
        worlds: of the jobs that stand on it. violations: of all of them.
    """

    def __init__(self, seed: int, hosts: int, *, keep_trace: bool) -> None:
        self.sched = Scheduler(seed, keep_trace=keep_trace)
        self.bucket = Bucket(self.sched)
        self.disk = Disk()
        root = self.disk.root()
        self.opened = Opened()
        self.doors: dict[str, SimKeeper] = {}
        self.hosts = [Host(number, root) for number in range(hosts)]
        self.worlds: list[Any] = []
        self.violations: list[tuple[str, str]] = []


class JobFolder(Folder):
    """A job's own part of the bucket, to its world and its checkers as the whole."""

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        super().__init__(bucket, prefix)
        self.watchers: list[Watcher] = []
        self.objects = _Objects(bucket.objects, prefix)
        bucket.watchers.append(self)

    @property
    def down_until_s(self) -> float:
        return self._bucket.down_until_s

    @down_until_s.setter
    def down_until_s(self, until_s: float) -> None:
        self._bucket.down_until_s = until_s

    @property
    def clock(self) -> Any:
        return self._bucket.clock

    # --- as a watcher of the bucket ------------------------------------------------------------

    def created(self, name: str, data: bytes) -> None:
        """Said onward, if it is in here."""
        if name.startswith(self._prefix):
            for watcher in self.watchers:
                watcher.created(name.removeprefix(self._prefix), data)

    def replaced(self, name: str, before: bytes, data: bytes) -> None:
        """Said onward, if it is in here."""
        if name.startswith(self._prefix):
            for watcher in self.watchers:
                watcher.replaced(name.removeprefix(self._prefix), before, data)

    def deleted(self, name: str, data: bytes) -> None:
        """Said onward, if it is in here."""
        if name.startswith(self._prefix):
            for watcher in self.watchers:
                watcher.deleted(name.removeprefix(self._prefix), data)


class _Objects(Mapping[str, tuple[bytes, int]]):
    """Those of a folder, by their names in it."""

    def __init__(self, objects: Mapping[str, tuple[bytes, int]], prefix: str) -> None:
        self._all, self._prefix = objects, prefix

    def __getitem__(self, name: str) -> tuple[bytes, int]:
        return self._all[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        cut = len(self._prefix)
        return iter([name[cut:] for name in self._all if name.startswith(self._prefix)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._prefix + name in self._all
