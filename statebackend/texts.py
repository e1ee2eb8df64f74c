"""Figures as people read them, the names that they may have meant, what they are to install."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from difflib import get_close_matches

__all__ = ["count", "did_you_mean", "duration", "install_extra", "seconds", "size", "when"]


def size(size_bytes: int) -> str:
    """Bytes for people: 1536 is 1.5 KiB."""
    amount, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def count(number: int, noun: str) -> str:
    """1 row, 2,000 rows."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} " + (f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s")


def seconds(amount_s: float) -> str:
    """A span for people: 340 ms, 2.3 s."""
    return f"{1000 * amount_s:.0f} ms" if amount_s < 0.9995 else f"{amount_s:.1f} s"


def duration(amount_s: float) -> str:
    """A long span for people: 41.2 s, 5 min 3 s, 2 h 5 min."""
    if amount_s < 60:
        return seconds(amount_s)
    minutes, rest_s = divmod(round(amount_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest_s} s"


def when(at_ms: int | None) -> str:
    """A time for people, in UTC; empty where it is not known."""
    if at_ms is None or at_ms < 0:
        return ""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def did_you_mean(name: str, known: Iterable[str], *, most: int = 1) -> str:
    """A question with the known names that are most like an unknown one; empty if none is."""
    folded = {one.casefold(): one for one in known}
    found = get_close_matches(name.casefold(), folded, n=most, cutoff=0.5)
    return f"Did you mean {' or '.join(repr(folded[one]) for one in found)}?" if found else ""


def install_extra(name: str, where: str = "") -> str:
    """What to do if a package is missing that an extra of this one brings.

    There is no release on a package index: it is installed from a clone of the repository.

    Args:
        name: of the extra. where: it is needed: "on the driver".
    """
    place = f", {where}" if where else ""
    return f"Install the extra {name!r}{place}: pip install '.[{name}]' in a clone of statebackend."
