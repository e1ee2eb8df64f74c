"""Local copies on a host's disk: the real folders, and in them stores that are a dict in memory and
files of what was flushed.

`ModelStore` is a `RocksStore` without RocksDB: `apply`, its batches and its marker are the real
ones; what was not flushed is gone when the process dies. What is done with
files, leases and the pointer is real; the disk is `files.Disk`.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from recovery.local.local_copies import LocalSubtask, StoreDirectory
from recovery.local.private_folders import unusable
from recovery.local.store_pool import HOLDER, Clock, StorePool, StorePoolSettings
from statebackend.errors import LocalCopyError, StoreBusyError
from statebackend.keygroups import KeyGroupRange
from statebackend.rocks import store as rocks
from statebackend.rocks.clipping import LAST_GROUP, GroupRange
from statebackend.rocks.parted import Opener
from statebackend.rocks.parts_layout import LAYOUT_FILE, decode_layout
from statebackend.rocks.store import Marker, RocksStore
from statebackend.state.table_base import KeyRange
from tests.sim.config import Config
from tests.sim.files import MemPath
from tests.sim.kernel import Process, Scheduler, current
from tests.sim.threads import SimSystem
from tests.support.faults import Fault

__all__ = ["ModelStore", "Opened", "SimKeeper", "SimSubtask", "ask_for", "files_state"]

_META = rocks.META_PREFIX
_CLIPPED = "CLIPPED"


class Opened:
    """Which process has which store open: RocksDB's own lock, and a witness for the checkers."""

    def __init__(self) -> None:
        self.by_path: dict[str, Process] = {}
        self.collisions: list[str] = []
        self._subtasks: dict[str, tuple[int, int]] = {}

    def met(self, folder: str, marker: Marker) -> None:
        """A store is in a subtask's folder: those of other key groups have folders of their own."""
        groups = marker.key_group_start, marker.key_group_end
        if self._subtasks.setdefault(folder, groups) != groups:
            self.collisions.append(f"{folder} has stores of two subtasks")


class _Iterator:
    """RocksDB's: a view of the moment when it was made, the marker included."""

    def __init__(self, view: Mapping[bytes, bytes]) -> None:
        self._view, self._keys, self._at = dict(view), sorted(view), 0

    def seek(self, key: bytes) -> None:
        self._at = bisect_left(self._keys, key)

    def valid(self) -> bool:
        return self._at < len(self._keys)

    def key(self) -> bytes | None:
        return self._keys[self._at] if self.valid() else None

    def value(self) -> bytes | None:
        return self._view[self._keys[self._at]] if self.valid() else None

    def next(self) -> None:
        self._at += 1

    def status(self) -> None:
        """Nothing can have gone wrong."""


class ModelStore(RocksStore):
    """A store as RocksDB would keep it."""

    def __init__(self, path: str, process: Process, opened: Opened, config: Config) -> None:
        self.path = path
        self._process, self._opened, self._config = process, opened, config
        self._mem: dict[bytes, bytes | None] = {}
        self._view: dict[bytes, bytes] = {}
        self._ordered: list[bytes] | None = None  # its keys, once somebody asked for ranges
        self._files: list[str] = []
        self._sizes: list[tuple[str, int]] = []
        self._number = 0
        self._db: Any = self  # closed when None
        try:
            self._load(MemPath(path))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise LocalCopyError(f"The local store {path} is damaged ({error}).") from error
        opened.by_path[path] = process
        self._merge_beside()

    @classmethod
    def open_in(
        cls, path: str, process: Process, opened: Opened, config: Config, *, make: bool = True
    ) -> ModelStore:
        """Open or make it.

        Raises:
            StoreBusyError: another process has it.
            LocalCopyError: its files are not those of its manifest.
        """
        holder = opened.by_path.get(path)
        if holder is not None and not holder.dead:
            opened.collisions.append(f"{process} opened {path}, which {holder} has open")
            raise StoreBusyError(f"The local store {path} is open in another process.")
        if not make and not MemPath(path, "CURRENT").exists():
            raise LocalCopyError(f"The local store {path} is not there.")
        return cls(path, process, opened, config)

    def _load(self, folder: MemPath) -> None:
        folder.mkdir(exist_ok=True)
        current_file = folder / "CURRENT"
        if not current_file.exists():
            return
        named = current_file.read_text()
        manifest = (folder / named).read_bytes()
        self._number = int(named.removeprefix("MANIFEST-"))
        for name, size_bytes in msgspec.json.decode(manifest, type=list[tuple[str, int]]):
            data = (folder / name).read_bytes()
            if len(data) != size_bytes:
                raise ValueError(f"{name} is {len(data)} bytes")
            self._files.append(name)
            self._sizes.append((name, size_bytes))
            self._number = max(self._number, int(name.partition(".")[0]))
            for key, value in msgspec.msgpack.decode(data, type=dict[bytes, bytes | None]).items():
                self._lay(key, value)

    def _lay(self, key: bytes, value: bytes | None) -> None:
        self._ordered = None
        if value is None:
            self._view.pop(key, None)
        else:
            self._view[key] = value

    def get(self, key: bytes) -> bytes | None:
        return self._view.get(key)

    def multi_get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self._view.get(key) for key in keys]

    def scan(self, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        for key in sorted(self._view):
            if key.startswith(prefix) and not key.startswith(_META):
                yield key, self._view[key]

    def scan_keys(self, ranges: Iterable[KeyRange]) -> Iterator[list[bytes]]:
        if self._ordered is None:
            self._ordered = sorted(self.content())
        keys, found = self._ordered, list[bytes]()
        for start, end, stop in ranges:
            low, high = bisect_left(keys, start), bisect_left(keys, end)
            if high < len(keys) and keys[high] < stop:
                high += 1
            found += keys[low:high]
        if found:
            yield found

    def content(self) -> dict[bytes, bytes]:
        """All but the marker."""
        return {key: value for key, value in self._view.items() if not key.startswith(_META)}

    def _write(self, keys: Sequence[bytes], values: Sequence[bytes | None], marker: Any) -> None:
        for key, value in zip(keys, values, strict=True):
            self._mem[key] = value
            self._lay(key, value)
        if marker is not None:
            raw = msgspec.json.encode(marker)
            self._mem[rocks._MARKER_KEY] = raw
            self._view[rocks._MARKER_KEY] = raw
        sched = current().sched
        if sched.chance(self._config.spontaneous_flush):
            self.flush()  # the memtable was full
        sched.pause(0.0002)

    def level0_files(self) -> int:
        return len(self._files)

    def give_up_whole_filters(self) -> bool:
        return False

    def live_bytes(self) -> int:
        return self._config.large_bytes

    def figures(self) -> dict[str, int]:
        rows = len(self._view)
        return {"stored_bytes": self.stored_bytes(), "estimated_rows": rows}

    def stored_bytes(self) -> int:
        return sum(len(k) + len(v) for k, v in self._view.items())

    def _merge_beside(self) -> None:
        """As RocksDB: beside all else."""
        if len(self._files) >= 8:
            sched = current().sched
            sched.spawn(self._process, self._merge, 0.05 * sched.random.random())

    def _merge(self) -> None:
        if self._db is not None:
            with contextlib.suppress(LocalCopyError):  # whoever reads what is damaged finds it
                self._compact()
                current().sched.note("a full level 0 is merged")

    def _compact(self) -> None:
        before = self._files
        self._mem = dict(self._view)
        self._files = []
        try:
            self._flush(MemPath(self.path))
        except OSError as error:
            raise LocalCopyError(f"The local store {self.path} failed ({error}).") from error
        for name in before:
            MemPath(self.path, name).unlink(missing_ok=True)

    # --- a part of another's -------------------------------------------------------------------

    def iter(self) -> _Iterator:
        """What the real ranges are read by, as of ``_db``."""
        return _Iterator(self._view)

    def cursor(self) -> Any:
        return dict(self._view)

    def between(self, view: Any, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        for key in sorted(view):
            if start <= key < end and not key.startswith(_META):
                yield key, view[key]

    def bytes_of(self, ranges: Sequence[GroupRange], held: Sequence[GroupRange]) -> int:
        return sum(len(k) + len(v) for k, v in self.content().items() if _within(k, ranges))

    def branch(
        self, path: str, ranges: Sequence[GroupRange], settings: Any, *, whole: bool = False
    ) -> None:
        """As the real one: a copy that has the marker until it is clipped."""
        sched, process = current().sched, current().process
        self.checkpoint(path)
        sched.pause(0.02)
        made = ModelStore.open_in(path, process, self._opened, self._config, make=False)
        try:
            made.clip(ranges, free=self.clipped or not whole)
        finally:
            made.close()
        sched.pause(0.02)

    def clip(self, ranges: Sequence[GroupRange], *, free: bool = True) -> None:
        if free:
            MemPath(self.path, _CLIPPED).write_bytes(b"")
        gone = [key for key in self._view if key.startswith(_META) or not _within(key, ranges)]
        for key in gone:
            self._mem[key] = None
            self._lay(key, None)
        self.flush()
        current().sched.pause(0.001)

    @property
    def clipped(self) -> bool:
        return MemPath(self.path, _CLIPPED).exists()

    def compact_clipped(self, *args: Any, **settings: Any) -> None:
        """Beside all else, as the thread that the real one starts."""
        if self.clipped:
            sched = current().sched
            sched.spawn(self._process, self._free, 0.05 * sched.random.random())

    def _free(self) -> None:
        if self._db is not None:
            with contextlib.suppress(LocalCopyError):  # whoever reads what is damaged finds it
                self._compact()
                MemPath(self.path, _CLIPPED).unlink(missing_ok=True)
                current().sched.note("what was cut off is freed")

    def flush(self) -> None:
        if self._process.dead or not self._mem:
            return
        try:
            self._flush(MemPath(self.path))
        except OSError as error:  # its host's disk is gone
            raise LocalCopyError(f"The local store {self.path} failed ({error}).") from error

    def _flush(self, folder: MemPath) -> None:
        self._number += 1
        name = f"{self._number:06d}.sst"
        (folder / name).write_bytes(msgspec.msgpack.encode(self._mem))
        self._mem = {}
        self._files.append(name)
        self._sizes.append((name, (folder / name).stat().st_size))
        sizes = self._sizes = [one for one in self._sizes if one[0] in self._files]
        self._number += 1
        manifest = f"MANIFEST-{self._number:06d}"
        (folder / manifest).write_bytes(msgspec.json.encode(sizes))
        temporary = folder / "CURRENT.tmp"
        temporary.write_text(manifest)
        temporary.replace(folder / "CURRENT")

    def checkpoint(self, path: str) -> list[str]:
        self.flush()
        folder, target = MemPath(self.path), MemPath(path)
        target.mkdir()
        try:
            for name, size_bytes in self._sizes:
                if (folder / name).stat().st_size != size_bytes:
                    raise LocalCopyError(f"{name} is not what was written.")
            for name in self._files:
                (folder / name).link_to(target / name)
        except OSError as error:
            raise LocalCopyError(f"The local store {self.path} is damaged ({error}).") from error
        manifest = f"MANIFEST-{self._number:06d}"  # RocksDB writes these two anew
        (target / manifest).write_bytes(msgspec.json.encode(self._sizes))
        (target / "CURRENT").write_text(manifest)
        return sorted(path.name for path in target.iterdir())

    def close(self) -> None:
        if self._db is None:
            return
        self.flush()
        self._db = None
        if not self._process.dead:
            self._opened.by_path.pop(self.path, None)


class SimIncarnation(StoreDirectory):
    """One whose lease the kernel takes back, and whose disk may be full."""

    def __init__(self, path: Any, lease: int, subtask: SimSubtask) -> None:
        threads = subtask._clock.threads
        super().__init__(path, lease, threads=threads, opener=subtask._opener)
        self._subtask = subtask

    def open_store(self, settings: Any) -> Any:
        opening = self.store is None
        half = opening and (self.path / "db.making").exists()
        store = super().open_store(settings)
        marker = store.marker() if opening else None
        if opening and (half or (marker is None and next(store.scan(), None))):
            current().sched.note("child half made", str(self.path))
        if marker is not None:
            self._subtask.opened.met(str(self.path.parent), marker)
        return store

    def write_delta(self, epoch: int, digest: str, data: bytes) -> None:
        if current().sched.chance(self._subtask.config.disk_full):
            current().sched.note(Fault.DISK_FULL)
            raise unusable(str(self.path), OSError(28, "No space left on device"))
        super().write_delta(epoch, digest, data)

    def abandon(self) -> None:
        """Its process is gone: the kernel frees the lease."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self.path.disk.os.close(lease)


class SimSubtask(LocalSubtask):
    """Makes store directories of the simulation's."""

    def __init__(
        self,
        local_dir: str,
        *,
        key_groups: KeyGroupRange,
        system: SimSystem,
        process: Process,
        opened: Opened,
        config: Config,
        store_pool: SimKeeper,
        held: list[SimIncarnation],
        doors: dict[str, SimKeeper],
        opener: Opener,
        operator: str = "op",
        job: str = "job",
    ) -> None:
        self.process, self.opened, self.config = process, opened, config
        self._held = held
        super().__init__(
            local_dir,
            job=job,
            operator=operator,
            key_groups=key_groups,
            new_id=system.new_id,
            clock=Clock.of(system),
            store_pool=store_pool,
            store_pool_settings=store_pool._settings,
            ask=lambda path, timeout_s: ask_for(doors, path, timeout_s),
            opener=opener,
        )

    def _lease(self, path: Any) -> StoreDirectory | None:
        held = super()._lease(path)
        if held is None:
            return None
        lease, held._lease = held._lease, None
        assert lease is not None
        made = SimIncarnation(held.path, lease, self)
        self._held[:] = [one for one in self._held if one._lease is not None]
        self._held.append(made)
        return made


class SimKeeper(StorePool):
    """A worker's open stores, without a socket: `ask_for` finds it by its door's name."""

    doors: dict[str, SimKeeper]

    def __init__(
        self,
        clock: Clock,
        settings: StorePoolSettings,
        process: Process,
        doors: dict[str, SimKeeper],
    ) -> None:
        self._clock, self._settings, self.process = clock, settings, process
        self._kept = {}
        self.swept = {}
        self._lock, self._closed = clock.threads.lock(), clock.threads.event()
        self.address = process.name
        doors[self.address] = self

    def tend(self, sched: Scheduler) -> None:
        """What the hand-over thread does besides."""
        while True:
            sched.pause(0.5)
            self._tidy()


def ask_for(doors: dict[str, SimKeeper], path: MemPath, timeout_s: float) -> bool:
    """As `recovery.local.store_pool.ask_for`: a message to the holder, and its answer."""
    sched = current().sched
    try:
        store_pool = doors[(path / HOLDER).read_text()]
    except (OSError, KeyError):
        return False
    sched.pause(0.0005)
    if store_pool.process.dead:
        return False
    if store_pool.process.frozen_until > sched.now_s:
        sched.pause(timeout_s)
        return False
    freed = store_pool._hand_over(path)
    sched.note("store handed over" if freed else "store asked for in vain")
    sched.pause(0.0005)
    return freed


def _within(key: bytes, ranges: Sequence[GroupRange]) -> bool:
    group = int.from_bytes(key[:2], "big")
    return any(first <= group <= last for first, last in ranges)


def files_state(files: Mapping[str, bytes]) -> dict[bytes, bytes]:
    """What the files of a store hold, in parts or not, without its marker."""
    if LAYOUT_FILE not in files:
        return _part_state(files)
    layout = decode_layout(files[LAYOUT_FILE], LAYOUT_FILE)
    state: dict[bytes, bytes] = {}
    for number, part in enumerate(layout.parts):
        start = f"{part}/"
        own = {name.removeprefix(start): d for name, d in files.items() if name.startswith(start)}
        ranges = layout.ranges_of(number, 0, LAST_GROUP)
        state |= {key: value for key, value in _part_state(own).items() if _within(key, ranges)}
    return state


def _part_state(files: Mapping[str, bytes]) -> dict[bytes, bytes]:
    state: dict[bytes, bytes] = {}
    manifest = files[files["CURRENT"].decode()]
    for name, _ in msgspec.json.decode(manifest, type=list[tuple[str, int]]):
        for key, value in msgspec.msgpack.decode(
            files[name], type=dict[bytes, bytes | None]
        ).items():
            if value is None:
                state.pop(key, None)
            else:
                state[key] = value
    return {key: value for key, value in state.items() if not key.startswith(_META)}
