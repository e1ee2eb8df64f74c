"""Local disks that lose, damage or refuse what is on them.

What is damaged lies still meanwhile: the Python workers of the host are stopped, and killed when it
is done. So whoever uses the copy next has to open it, and meets the damage.
"""

from __future__ import annotations

import contextlib
import random as random_numbers
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from recovery.drill.scenario import DrillFault
from recovery.drill.shim import Shim, shim_of
from recovery.drill.stage import Host, Stage

__all__ = ["FAULTS", "LASTS_S", "LocalPlace", "places"]

LASTS_S: Final = 3.0  # how long a disk refuses, after...
_OPEN_S: Final = 1.0  # ... this long for stores that are open on it
_SEEN_LIMIT_S: Final = 20.0
_SEEN_EPOCHS: Final = 3
_WAIT_S: Final = 120.0
# A disk that refuses fails one attempt after the other until it is well again.
_PATIENT: Final = {"spark.task.maxFailures": "1000"}


@dataclass(frozen=True)
class LocalPlace:
    """One subtask's local copy that counts, on one host."""

    host: Host
    pointer: Path
    copy: Path

    @property
    def name(self) -> str:
        """Host, operator and subtask."""
        return f"{self.host.name} {self.pointer.parent.parent.name}/{self.pointer.parent.name}"

    def files(self) -> dict[str, list[Path]]:
        """What there is to damage, by kind; empty files are left out."""
        db = self.copy / "db"
        found = {
            "pointer": [self.pointer],
            "table": sorted(db.glob("*.sst")),
            "MANIFEST": sorted(db.glob("MANIFEST-*")),
            "CURRENT": sorted(db.glob("CURRENT")),
            "delta": sorted(self.copy.glob("deltas/[0-9]*-*")),
        }
        return {
            kind: [path for path in paths if path.stat().st_size] for kind, paths in found.items()
        }

    def looked_at(self, file: Path | None = None, damaged: bytes = b"") -> bool:
        """Whether somebody has put aside what was damaged.

        Args:
            file: what was damaged; None for all. damaged: what it held then.
        """
        try:
            if file is not None and file.parent.name == "deltas":
                return not file.exists() or file.read_bytes() != damaged
            named = self.pointer.read_text()
            return named != self.copy.name and (self.pointer.parent / named).is_dir()
        except (OSError, ValueError):
            return False


def places(stage: Stage) -> list[LocalPlace]:
    """The local copies that count, on all hosts, in a fixed order."""
    found = []
    for host in stage.hosts:
        for pointer in sorted(host.local_dir.glob("*/*/*/current")):
            with contextlib.suppress(OSError, ValueError):
                copy = pointer.parent / pointer.read_text()
                if (copy / "db").is_dir():
                    found.append(LocalPlace(host, pointer, copy))
    return found


@contextlib.contextmanager
def _still(stage: Stage, host: Host) -> Iterator[None]:
    """Nobody touches a host's local copies inside; afterwards those who had them open are gone."""
    workers = stage.processes.python_workers(host.name)
    stage.processes.freeze(workers)
    try:
        yield
    finally:
        stage.processes.kill(workers)


def _drawn(stage: Stage, rng: random_numbers.Random) -> LocalPlace:
    found: list[LocalPlace] = stage.until(lambda: places(stage), "a local copy", _WAIT_S)
    return rng.choice(found)


def _outcome(stage: Stage, what: str, seen: Callable[[], bool]) -> str:
    """Wait until the damage was met, or long enough; what to say of it."""
    before, waited_s = stage.committed(), 0.0
    while not seen():
        # Damage in a part that nobody needs stays where it is, and does no harm.
        if waited_s >= _SEEN_LIMIT_S or stage.committed() >= before + _SEEN_EPOCHS:
            return f"{what} (nobody needed it)"
        stage.pause(0.05)
        waited_s += 0.05
    return f"{what} (noticed)"


Damage = Callable[[Path, random_numbers.Random], None]


def _delete(path: Path, _: random_numbers.Random) -> None:
    path.unlink()


def _truncate(path: Path, rng: random_numbers.Random) -> None:
    size_bytes = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(rng.randrange(size_bytes))


def _flip(path: Path, rng: random_numbers.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    with path.open("r+b") as file:  # in place: another name of the same file sees it too
        file.write(data)


def _damaging(damage: Damage) -> Callable[[Stage, random_numbers.Random], str]:
    """Damage one file of one copy, drawn by kind first."""

    def strike(stage: Stage, rng: random_numbers.Random) -> str:
        place = _drawn(stage, rng)
        with _still(stage, place.host):
            files = {kind: paths for kind, paths in place.files().items() if paths}
            kind = rng.choice(sorted(files))
            path = rng.choice(files[kind])
            damage(path, rng)
            damaged = path.read_bytes() if path.exists() else b""
        return _outcome(
            stage, f"{place.name}: {kind} {path.name}", lambda: place.looked_at(path, damaged)
        )

    return strike


def _delete_any(stage: Stage, rng: random_numbers.Random) -> str:
    """All copies of a host, one copy, or one file of it."""
    which = rng.choice(["host", "copy", "file"])
    if which == "file":
        return _damaging(_delete)(stage, rng)
    place = _drawn(stage, rng)
    gone = place.host.local_dir if which == "host" else place.copy
    with _still(stage, place.host):
        shutil.rmtree(gone, ignore_errors=True)
    what = f"{place.host.name}: all" if which == "host" else f"{place.name}: all of it"
    return _outcome(stage, what, place.looked_at)


def _replace_by_foreign(stage: Stage, rng: random_numbers.Random) -> str:
    """Put another subtask's store, table file or delta where a subtask's own was."""
    pairs = stage.until(lambda: _pairs(stage), "two local copies on one host", _WAIT_S)
    own, other = rng.choice(pairs)
    with _still(stage, own.host):
        ours, theirs = own.files(), other.files()
        kinds = ["store", *(k for k in ("table", "delta") if ours[k] and theirs[k])]
        kind = rng.choice(kinds)
        file, damaged = None, b""
        if kind == "store":
            for folder in ("db", "deltas"):
                shutil.rmtree(own.copy / folder, ignore_errors=True)
                if (other.copy / folder).is_dir():
                    shutil.copytree(other.copy / folder, own.copy / folder)
        else:
            file = rng.choice(ours[kind])
            damaged = rng.choice(theirs[kind]).read_bytes()
            file.write_bytes(damaged)
    what = f"{own.name}: {kind} of {other.name}"
    return _outcome(stage, what, lambda: own.looked_at(file, damaged))


def _pairs(stage: Stage) -> list[tuple[LocalPlace, LocalPlace]]:
    found = places(stage)
    return [
        (own, other)
        for own in found
        for other in found
        if own.host.name == other.host.name and own.pointer != other.pointer
    ]


def _refusing(
    turn_on: Callable[[Shim, Path], None],
) -> Callable[[Stage, random_numbers.Random], str]:
    """A disk that refuses for a while, and stores that must be opened on it."""

    def strike(stage: Stage, rng: random_numbers.Random) -> str:
        shim = shim_of(stage)
        host = _drawn(stage, rng).host
        with shim.calm_afterwards():
            turn_on(shim, host.local_dir)
            stage.pause(_OPEN_S)
            # Stores that are open may do without the disk for long: now they must be opened.
            stage.processes.kill(stage.processes.python_workers(host.name))
            shim.forget_refusals()
            stage.until(shim.refused, "somebody to need the disk", _WAIT_S)
            stage.pause(LASTS_S)
        return f"{host.name}, until {LASTS_S:g} s after a store could not be opened"

    return strike


FAULTS: tuple[DrillFault, ...] = (
    DrillFault(
        name="local-deleted",
        summary="A file of a task-local copy, a whole copy or all copies of a host are deleted.",
        promise="The durable copy takes their place, and results are exact.",
        strike=_delete_any,
    ),
    DrillFault(
        name="local-truncated",
        summary="A table file, MANIFEST, pointer or delta of a task-local copy is cut short.",
        promise="It is noticed when the copy is opened, the durable copy is used, and results are "
        "exact.",
        strike=_damaging(_truncate),
    ),
    DrillFault(
        name="local-flipped",
        summary="One bit of a table file, MANIFEST, pointer or delta of a task-local copy is "
        "flipped.",
        promise="Nothing wrong is read: it is noticed where it is needed, the durable copy is "
        "used, and results are exact.",
        strike=_damaging(_flip),
    ),
    DrillFault(
        name="local-foreign",
        summary="Another subtask's store, table file or delta lies where a subtask's own was.",
        promise="It is not taken for the subtask's own, the durable copy is used, and results are "
        "exact.",
        strike=_replace_by_foreign,
    ),
    DrillFault(
        name="local-read-only",
        summary="A host's local directory cannot be written for some seconds.",
        promise="Attempts that need it fail without an ack and are repeated; results are exact.",
        strike=_refusing(Shim.forbid_writes),
        needs=frozenset({"compiler"}),
        conf=_PATIENT,
    ),
    DrillFault(
        name="disk-full",
        summary="The disk behind a host's local directory is full for some seconds.",
        promise="Attempts that need room fail without an ack and are repeated; results are exact.",
        strike=_refusing(Shim.fill_disk),
        needs=frozenset({"compiler"}),
        conf=_PATIENT,
    ),
    DrillFault(
        name="fsync-failing",
        summary="Syncing files of a host's local directory gives an I/O error for some seconds.",
        promise="A store that could not be synced is put aside, attempts are repeated, and results "
        "are exact.",
        strike=_refusing(Shim.fail_syncs),
        needs=frozenset({"compiler"}),
        conf=_PATIENT,
    ),
)
