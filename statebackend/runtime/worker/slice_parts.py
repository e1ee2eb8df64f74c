"""What an ack carries: slices inline where the budget allows, else durable before it is sent."""

from __future__ import annotations

from collections.abc import Sequence

from snapshot.formats.delta import encode_delta
from snapshot.formats.delta_in_pieces import EncodedDelta
from snapshot.protocol.messages import SlicePart
from snapshot.storage.object_store import ObjectStore

__all__ = ["durable_slice", "packed_base"]


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


def packed_base(
    entries: Sequence[tuple[bytes, bytes]],
    store: ObjectStore,
    limit_bytes: int,
    left_bytes: int,
    name: str,
) -> tuple[SlicePart | None, int]:
    """The whole state with the ack; or, where it is not small, how large it is.

    Args:
        entries: in key order.
        limit_bytes: what is small.
        left_bytes: what there is room for beside the delta and the lists. A small base for which
            there is none has an object of its own: it would not find more the next time.
        name: of that.
    """
    full = encode_delta([k for k, _ in entries], [v for _, v in entries])
    size_bytes, digest = len(full.data), full.digest.hex()
    if size_bytes > limit_bytes:
        return None, size_bytes
    part = SlicePart(digest=digest, size_bytes=size_bytes, rows=full.rows, data=full.data)
    if size_bytes > left_bytes:
        store.put(name, [full.data])
        part = SlicePart(digest=digest, size_bytes=size_bytes, rows=full.rows, name=name)
    return part, 0
