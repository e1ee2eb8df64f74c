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
from functools import partial
from pathlib import Path
from typing import Final

from recovery.drill.faults.drill_fault import DrillFault
from recovery.drill.faults.shim import Shim, shim_of
from recovery.drill.faults.stage import CannotStrikeError, Host, Stage
from recovery.drill.faults.waits import until_noticed, until_or_end

__all__ = ["FAULTS", "LASTS_S", "LocalPlace", "places"]

LASTS_S: Final = 3.0  # how long a disk refuses, after...
_OPEN_S: Final = 1.0  # ... this long for stores that are open on it
_STILL_TRIES: Final = 5
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
            "table": sorted(db.rglob("*.sst")),
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
    frozen: list[int] = []
    try:
        # One may have begun since the last list.
        while new := [
            pid for pid in stage.processes.python_workers(host.name) if pid not in frozen
        ]:
            stage.processes.freeze(new)
            frozen += new
        yield
    finally:
        stage.processes.kill(frozen)


def _drawn(stage: Stage, rng: random_numbers.Random) -> LocalPlace:
    found: list[LocalPlace] = until_or_end(stage, lambda: places(stage), "a local copy", _WAIT_S)
    return rng.choice(found)


Struck = tuple[str, Callable[[], bool]]


def _strike_still(
    stage: Stage,
    rng: random_numbers.Random,
    candidates: Callable[[Host], list[LocalPlace]],
    strike: Callable[[LocalPlace], Struck],
) -> str:
    """Strike a copy of a host that lies still, and wait until it was met.

    Args:
        candidates: the copies of a host that may be struck. They are asked for again once it lies
            still: until then a new worker or a compaction may move them.
        strike: does it; gives what it was, and how to see that it was met.

    Raises:
        CannotStrikeError: what was to be struck went away each time.
    """
    for _ in range(_STILL_TRIES):
        hosts: list[Host] = until_or_end(
            stage,
            lambda: [host for host in stage.hosts if candidates(host)],
            "local copies to strike",
            _WAIT_S,
        )
        host = rng.choice(hosts)
        with _still(stage, host), contextlib.suppress(FileNotFoundError, shutil.Error):
            if found := candidates(host):
                what, seen = strike(rng.choice(found))
                break
    else:
        raise CannotStrikeError("the local copies went away each time")
    return until_noticed(stage, what, seen)


def _places_of(stage: Stage, host: Host) -> list[LocalPlace]:
    return [place for place in places(stage) if place.host.name == host.name]


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
        def one(place: LocalPlace) -> Struck:
            files = {kind: paths for kind, paths in place.files().items() if paths}
            kind = rng.choice(sorted(files))
            path = rng.choice(files[kind])
            damage(path, rng)
            damaged = path.read_bytes() if path.exists() else b""
            return f"{place.name}: {kind} {path.name}", lambda: place.looked_at(path, damaged)

        return _strike_still(stage, rng, partial(_places_of, stage), one)

    return strike


def _delete_any(stage: Stage, rng: random_numbers.Random) -> str:
    """All copies of a host, one copy, or one file of it."""
    which = rng.choice(["host", "copy", "file"])
    if which == "file":
        return _damaging(_delete)(stage, rng)

    def strike(place: LocalPlace) -> Struck:
        shutil.rmtree(place.host.local_dir if which == "host" else place.copy, ignore_errors=True)
        what = f"{place.host.name}: all" if which == "host" else f"{place.name}: all of it"
        return what, place.looked_at

    return _strike_still(stage, rng, partial(_places_of, stage), strike)


def _replace_by_foreign(stage: Stage, rng: random_numbers.Random) -> str:
    """Put another subtask's store, table file or delta where a subtask's own was."""

    def candidates(host: Host) -> list[LocalPlace]:
        found = _places_of(stage, host)
        return found if len(found) > 1 else []

    def strike(own: LocalPlace) -> Struck:
        other = rng.choice([o for o in candidates(own.host) if o.pointer != own.pointer])
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
        return f"{own.name}: {kind} of {other.name}", lambda: own.looked_at(file, damaged)

    return _strike_still(stage, rng, candidates, strike)


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
            until_or_end(stage, shim.refused, "somebody to need the disk", _WAIT_S)
            stage.pause(LASTS_S)
        return f"{host.name}, until {LASTS_S:g} s after a store could not be opened"

    return strike


FAULTS: tuple[DrillFault, ...] = (
    DrillFault(
        name="local-deleted",
        summary="A file of a local copy, a whole copy or all copies of a host are deleted.",
        promise="The durable copy takes their place, and results are exact.",
        strike=_delete_any,
    ),
    DrillFault(
        name="local-truncated",
        summary="A table file, MANIFEST, pointer or delta of a local copy is cut short.",
        promise="It is noticed when the copy is opened, the durable copy is used, and results are "
        "exact.",
        strike=_damaging(_truncate),
    ),
    DrillFault(
        name="local-flipped",
        summary="One bit of a table file, MANIFEST, pointer or delta of a local copy is flipped.",
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
