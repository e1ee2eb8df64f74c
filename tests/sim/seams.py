"""Where the simulation takes the place of threads, clocks, sockets and Spark in the real code.

`installed` sets names in modules for as long as a world runs, and puts them back. Nothing of the
protocol is replaced here: only what it stands on, and (in most worlds) Arrow's encoding of deltas,
which takes half a millisecond and decides nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pyarrow as pa
from blake3 import blake3

import recovery.fetch
import recovery.folders
import recovery.incarnation
import recovery.keeper
import recovery.local
import recovery.rescale
import recovery.restore
import recovery.steps
import recovery.upload
import snapshot.log
import snapshot.progress
import snapshot.recordcache
import snapshot.tenure
import statebackend.spark.housekeeping
import statebackend.spark.job
import statebackend.spark.launch
import statebackend.spark.records
import statebackend.spark.session
import statebackend.spark.slices
import statebackend.spark.startpoint
import statebackend.spark.task
from snapshot.delta import Delta, DeltaRows, check_digest
from snapshot.delta_stream import EncodedDelta
from snapshot.stamps import Stamps
from statebackend.rocks import layout, parted
from statebackend.rocks import store as rocks
from statebackend.state.table import FrozenOverlay
from tests.sim.disk import SimKeeper, ask_for
from tests.sim.files import Disk, MemPath
from tests.sim.kernel import Scheduler, current
from tests.sim.location import SimLocation
from tests.sim.savepoints import replacements as of_savepoints
from tests.sim.threads import Future, Pool, Semaphore, Threading, wait

__all__ = ["decoded", "installed"]

_spark = statebackend.spark
_ABSENT = object()
_BATCH_ROWS = 4  # of a store's write: a delta is applied in several


class System:
    """In the place of `statebackend.system`."""

    def __init__(self, sched: Scheduler) -> None:
        self._sched = sched
        self.new_id = sched.new_id

    def monotonic_s(self) -> float:
        return self._sched.now_s

    def sleep_s(self, seconds: float) -> None:
        self._sched.pause(seconds)

    def process_name(self) -> str:
        return current().process.name

    def host_name(self) -> str:
        return current().process.name.partition(".")[0]

    def executor_name(self) -> str:
        return current().process.name


class _Turns:
    """A semaphore for each process, where the real one is a module's."""

    def _own(self) -> Semaphore:
        process = current().process
        own: Semaphore | None = getattr(process, "turn", None)
        if own is None:
            own = Semaphore(1)
            process.turn = own  # type: ignore[attr-defined]
        return own

    def acquire(self, timeout: float | None = None) -> bool:
        return self._own().acquire(timeout)

    def release(self) -> None:
        self._own().release()


class _Services:
    """In the place of the driver's gRPC server."""

    running: ClassVar[dict[str, Any]] = {}

    @classmethod
    def get(cls, spark: Any, settings: Any) -> Any:
        return SimpleNamespace(remove=spark.remove_session)

    @classmethod
    def stamps_of(cls, uri: str) -> Stamps | None:
        known = cls.running.get(uri)
        return known[3].stamps if known else None


def _text(path: MemPath) -> str | None:
    return path.read_text() if path.exists() else None


# --- a quick encoding -------------------------------------------------------------------------


def _encoded(keys: Sequence[bytes], values: Sequence[bytes | None]) -> Delta:
    data = msgspec.msgpack.encode(list(zip(keys, values, strict=True)))
    return Delta(data, blake3(data).digest(), len(keys))


def _encoded_frozen(frozen: FrozenOverlay, path: Callable[[], Path]) -> EncodedDelta:
    if not len(frozen):
        return EncodedDelta(b"", None, blake3(b"").digest(), 0, 0)
    delta = _encoded(*frozen.sorted())
    return EncodedDelta(delta.data, None, delta.digest, len(delta.data), delta.rows)


def _pairs(data: bytes) -> list[tuple[bytes, bytes | None]]:
    return msgspec.msgpack.decode(data, type=list[tuple[bytes, bytes | None]])


def _iterated(
    source: bytes | Path, *, digest: bytes | None = None, name: str = ""
) -> Iterator[DeltaRows]:
    data = source if isinstance(source, bytes) else source.read_bytes()
    if digest is not None:
        check_digest(blake3(data).digest(), digest, name)
    pairs = _pairs(data)
    for start in range(0, len(pairs), _BATCH_ROWS):
        piece = pairs[start : start + _BATCH_ROWS]
        yield DeltaRows(
            pa.array([key for key, _ in piece], pa.binary()),
            pa.array([value for _, value in piece], pa.binary()),
        )


def decoded(data: bytes, *, arrow: bool) -> list[tuple[bytes, bytes | None]]:
    """A delta's rows, for checkers."""
    if not data:
        return []
    if not arrow:
        return _pairs(data)
    from snapshot.delta import decode_delta

    rows = decode_delta(data)
    return list(zip(rows.keys.to_pylist(), rows.values.to_pylist(), strict=True))


# --- all of it --------------------------------------------------------------------------------


def _replacements(
    sched: Scheduler,
    doors: dict[str, SimKeeper],
    disk: Disk,
    world: Any,
    *,
    arrow: bool,
) -> Iterator[tuple[Any, str, Any]]:
    for module in (
        recovery.incarnation,
        recovery.keeper,
        recovery.upload,
        snapshot.log,
        snapshot.progress,
        snapshot.recordcache,
        snapshot.tenure,
        _spark.housekeeping,
        _spark.records,
        _spark.session,
    ):
        yield module, "threading", Threading
    for module in (_spark.housekeeping, _spark.session):
        yield module, "wait", wait
    yield _spark.housekeeping, "Future", Future
    yield _spark.housekeeping.Background, "_all", set()  # which is waited for at exit
    for module in (recovery.fetch, _spark.job):
        yield module, "ThreadPoolExecutor", Pool
    system = System(sched)
    for module in (_spark.job, _spark.launch, _spark.session, _spark.startpoint, _spark.task):
        yield module, "system", system
    yield recovery.local, "ask_for", lambda path, timeout_s: ask_for(doors, path, timeout_s)
    yield recovery.upload, "_turn", _Turns()
    stores = SimpleNamespace(open=world.open_store)
    for module in (parted, recovery.rescale):
        yield module, "RocksStore", stores
    yield parted, "os", disk.os
    yield layout, "open", lambda path, mode: MemPath(path).open(mode)
    yield recovery.rescale, "SMALL_BYTES", world.config.small_bytes
    yield _spark.housekeeping, "clean", world.clean
    yield recovery.local, "Path", MemPath
    # One user has the disks of a world.
    yield recovery.local, "home_of", MemPath
    yield recovery.local, "own_folder", lambda path: path.mkdir(parents=True, exist_ok=True)
    yield recovery.local, "own_file_text", _text
    for module in (
        recovery.folders,
        recovery.incarnation,
        recovery.local,
        recovery.rescale,
        recovery.restore,
        recovery.upload,
    ):
        for name in ("os", "fcntl", "shutil"):
            if hasattr(module, name):
                yield module, name, getattr(disk, name)
    yield _spark.launch, "Services", _Services
    yield _spark.launch, "CheckpointLocation", lambda spark, path: SimLocation(spark.shared, sched)
    yield _spark.launch, "check_sink", lambda query, checked: None
    yield _spark.task, "_unhurried_collector", contextlib.nullcontext
    yield rocks, "_BATCH_ROWS", _BATCH_ROWS
    yield from of_savepoints(world, system)
    if not arrow:
        yield _spark.task, "encode_frozen", _encoded_frozen
        yield _spark.slices, "encode_delta", _encoded
        yield recovery.upload, "encode_delta", _encoded
        yield recovery.steps, "iter_delta", _iterated


@contextlib.contextmanager
def installed(
    sched: Scheduler,
    doors: dict[str, SimKeeper],
    disk: Disk,
    world: Any,
    *,
    arrow: bool,
) -> Iterator[None]:
    """While open, the real code stands on the simulation."""
    before: list[tuple[Any, str, Any]] = []
    silent = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    _Services.running.clear()
    try:
        for module, name, value in _replacements(sched, doors, disk, world, arrow=arrow):
            before.append((module, name, getattr(module, name, _ABSENT)))
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in reversed(before):
            if value is _ABSENT:  # a builtin's name
                delattr(module, name)
            else:
                setattr(module, name, value)
        logging.disable(silent)
