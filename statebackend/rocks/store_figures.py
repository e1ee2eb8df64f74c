"""What RocksDB says of a database for nothing: no scan, no statistics."""

from __future__ import annotations

from typing import Any, Final

from statebackend.rocks.load_compaction import level0_files

__all__ = ["joined_figures", "store_figures"]

_UNFLUSHED: Final = "rocksdb.cur-size-all-mem-tables"
_MEMORY: Final = (_UNFLUSHED, "rocksdb.estimate-table-readers-mem")


def store_figures(db: Any, live_bytes: int) -> dict[str, int]:
    """Counts of a database.

    Args:
        live_bytes: of its data on disk.

    Returns:
        ``estimated_rows``: a row that was written several times since files were merged last counts
        as often. ``memory_bytes``: write buffers, indexes and filters, without the block cache,
        which all databases of a process share.
    """

    def ask(name: str) -> int:
        return int(db.property_int_value(name) or 0)

    return {
        "level0_files": level0_files(db),
        "stored_bytes": live_bytes + ask(_UNFLUSHED),
        "estimated_rows": ask("rocksdb.estimate-num-keys"),
        "memory_bytes": sum(map(ask, _MEMORY)),
    }


def joined_figures(parts: list[dict[str, int]]) -> dict[str, int]:
    """Those of several databases that are one store."""
    joined = {name: sum(part[name] for part in parts) for name in parts[0]}
    joined["level0_files"] = max(part.get("level0_files", 0) for part in parts)
    return joined
