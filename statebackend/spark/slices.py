"""What an ack carries: slices inline where the budget allows, else durable before it is sent."""

from __future__ import annotations

from snapshot.delta import encode_delta
from snapshot.delta_stream import EncodedDelta
from snapshot.messages import SlicePart
from snapshot.storage.base import ObjectStore
from snapshot.storage.counting import CountingStore
from statebackend.state.table import StateTable

__all__ = ["durable_slice", "inline_base", "requests_of"]


def durable_slice(
    store: ObjectStore, delta: EncodedDelta, budget_bytes: int, name: str
) -> SlicePart:
    """A slice: inline if the budget allows, else an object of its own, durable on return."""
    digest = delta.digest.hex()
    if delta.path is not None:
        store.put_file(name, delta.path)
    elif delta.size_bytes > budget_bytes:
        store.put(name, [delta.data or b""])
    else:
        return SlicePart(
            digest=digest, size_bytes=delta.size_bytes, rows=delta.rows, data=delta.data or b""
        )
    return SlicePart(digest=digest, size_bytes=delta.size_bytes, rows=delta.rows, name=name)


def inline_base(table: StateTable, budget_bytes: int) -> tuple[SlicePart | None, int]:
    """The whole state for the record; or, where that is too large, how large it is."""
    entries = list(table.snapshot())
    if not entries:
        return None, 0
    full = encode_delta([k for k, _ in entries], [v for _, v in entries])
    size_bytes = len(full.data)
    if size_bytes > budget_bytes:
        return None, size_bytes
    digest = full.digest.hex()
    return SlicePart(digest=digest, size_bytes=size_bytes, rows=full.rows, data=full.data), 0


def requests_of(store: CountingStore) -> dict[str, tuple[int, int]]:
    """Requests and bytes so far, by verb."""
    return {verb: (one.requests, one.size_bytes) for verb, one in store.counts.items()}
