"""Every file operation of a life fails: the disk is broken once, or full for a while."""

from __future__ import annotations

import errno
import os
import shutil
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.crash.disk import after_a_cut, pending
from tests.crash.life import Kind, lived, reopened

__all__ = ["CODES", "Failed", "FailsFrom", "try_failures"]

# A broken block is met once; a disk that is full stays so for a while.
CODES: Final = ((errno.EIO, 1), (errno.ENOSPC, 3))


class FailsFrom:
    """Fails ``times`` operations, beginning with one of a number."""

    def __init__(self, number: int, code: int, times: int = 1) -> None:
        self._failing = range(number, number + times)
        self._code = code
        self.asked = 0
        self.first = ""

    def __call__(self, kind: str, path: str) -> OSError | None:
        number, self.asked = self.asked, self.asked + 1
        if number not in self._failing:
            return None
        self.first = self.first or f"{kind} {path}"
        return OSError(self._code, os.strerror(self._code), path)


@dataclass
class Failed:
    """What came of it: operations that failed, typed errors by code, and what went wrong."""

    operations: int = 0
    failures: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    unnoticed: int = 0
    violations: list[str] = field(default_factory=list)


def try_failures(kind: Kind, root: Path, *, share: tuple[int, int] = (0, 1)) -> Failed:
    """Fail every operation, one life for each, and cut the power at the end of it.

    A life goes on only through errors that are typed, and finishes all its epochs. What an error
    said nothing of must have been of no consequence: ``unnoticed`` counts them.

    Args:
        root: an empty folder.
        share: of (part, parts): every so-many-th operation, beginning with that one.
    """
    never = FailsFrom(-1, 0)
    lived(root / "whole", kind, never)
    failed = Failed(operations=never.asked)
    for number in range(share[0], never.asked, share[1]):
        for code, times in CODES:
            plan = FailsFrom(number, code, times)
            found = _one(kind, root / f"{number}-{code}", plan, failed)
            failed.failures += 1
            if found:
                failed.violations.append(f"{number} {errno.errorcode[code]}, {plan.first}: {found}")
    return failed


def _one(kind: Kind, root: Path, plan: FailsFrom, failed: Failed) -> str:
    try:
        life = lived(root / "life", kind, plan)
        failed.errors.update(error.code for error in life.refused)
        failed.unnoticed += not life.refused
        ops = life.ops
        left = pending(ops)
        image = after_a_cut(ops, frozenset(left.names), dict.fromkeys(left.files, "lost"))
        reopened(image, root / "again", kind, life.committed_at(len(ops)))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return ""
