"""Every cut of a recorded life: after each operation, and for each what a disk may have lost."""

from __future__ import annotations

import hashlib
import shutil
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from statebackend.errors import StateBackendError
from tests.crash.disk import Image, Op, Tear, after_a_cut, pending
from tests.crash.life import Life, reopened

__all__ = ["Cut", "Tried", "check_of", "cuts_of", "try_cuts"]

# Of the names that are pending: so many of the youngest are lost, and kept, one by one.
SINGLES: Final = 5
Check = Callable[[Image, Path, int], None]
TEARS: Final[Sequence[Tear]] = ("torn", "zeros")


@dataclass(frozen=True)
class Cut:
    """``how``: what became of what was not synced, after ``operations`` operations."""

    operations: int
    how: str
    lost_names: frozenset[int] = frozenset()
    torn: Mapping[int, Tear] = field(default_factory=dict)

    def image(self, ops: Sequence[Op]) -> dict[str, bytes | None]:
        """What the disk holds."""
        return after_a_cut(ops[: self.operations], self.lost_names, self.torn)


def cuts_of(ops: Sequence[Op], operations: int, singles: int = SINGLES) -> Iterator[Cut]:
    """The cuts after so many operations: a killed process first, then what a power cut may do."""
    yield Cut(operations, "all survives")
    left = pending(ops[:operations])
    if not left:
        return
    names, files = frozenset(left.names), left.files
    gone: dict[int, Tear] = dict.fromkeys(files, "lost")
    yield Cut(operations, "nothing survives", names, gone)
    on_store = frozenset(n for n in names if ops[n].path.startswith("store"))
    yield Cut(operations, "only names survive", torn=gone)
    yield Cut(operations, "the store loses names", on_store)
    yield Cut(operations, "the copies lose names", names - on_store)
    for name in left.names[-singles:]:
        yield Cut(operations, "one name is lost", frozenset({name}))
        yield Cut(operations, "one name survives", names - {name}, gone)
    for inode in files[-singles:]:
        for how in TEARS:
            yield Cut(operations, f"one file is {how}", torn={inode: how})
        others: dict[int, Tear] = {other: "lost" for other in files if other != inode}
        yield Cut(operations, "one file survives", names, others)


@dataclass
class Tried:
    """What came of it.

    Attributes:
        cuts: by step of the protocol (that of the last operation) and by what was lost.
        images: different disks among them: each was opened once.
        violations: what went wrong, with the cut.
    """

    operations: Counter[str] = field(default_factory=Counter)
    cuts: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    images: int = 0
    violations: list[str] = field(default_factory=list)


def try_cuts(
    ops: Sequence[Op],
    check: Check,
    root: Path,
    *,
    first: int = 0,
    share: tuple[int, int] = (0, 1),
    singles: int = SINGLES,
    alike: Callable[[str], bool] = lambda path: False,
) -> Tried:
    """Cut everywhere and start again.

    Args:
        check: of a disk, in a folder that does not exist yet, after so many operations; raises.
        root: an empty folder for disks.
        first: operations that set the scene; cuts begin after them.
        share: of (part, parts): every so-many-th cut, beginning with that one.
        singles: so many of the youngest names, and of the files, are lost or kept one by one.
        alike: whether a path is nothing by which disks differ: one of those is opened.
    """
    tried, seen = Tried(), set[bytes]()
    tried.operations.update(op.step for op in ops[first:])
    number = -1
    for operations in range(first, len(ops) + 1):
        step = ops[operations - 1].step if operations else "start"
        for cut in cuts_of(ops, operations, singles):
            number += 1
            if number % share[1] != share[0]:
                continue
            tried.cuts[step] += 1
            tried.losses[cut.how] += 1
            image = cut.image(ops)
            digest = _digest(image, step, alike)
            if digest in seen:
                continue
            seen.add(digest)
            tried.images += 1
            found = _try(check, image, root / str(number), operations)
            if found:
                tried.violations.append(f"{cut.operations} ({step}), {cut.how}: {found}")
    return tried


def check_of(life: Life) -> Check:
    """The check of a whole job."""
    return lambda image, root, operations: reopened(
        image, root, life.kind, life.committed_at(operations)
    )


def _try(check: Check, image: Image, root: Path, operations: int) -> str:
    try:
        check(image, root, operations)
    except (AssertionError, StateBackendError, OSError, ValueError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return ""


def _digest(image: Image, step: str, alike: Callable[[str], bool]) -> bytes:
    hasher = hashlib.blake2b(step.encode(), digest_size=16)
    for path in sorted(path for path in image if not alike(path)):
        data = image[path]
        hasher.update(f"\0{path}\0{-1 if data is None else len(data)}\0".encode())
        hasher.update(data or b"")
    return hasher.digest()
