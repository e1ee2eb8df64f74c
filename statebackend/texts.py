"""Figures as people read them."""

from __future__ import annotations

__all__ = ["size"]


def size(size_bytes: int) -> str:
    """Bytes for people: 1536 is 1.5 KiB."""
    amount, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
