"""Bytes in one zstd frame whose size is known and bounded before anything is unpacked."""

from __future__ import annotations

import zstandard

__all__ = ["PackedError", "pack", "unpack"]


class PackedError(ValueError):
    """Not one whole zstd frame within the limit."""


def pack(data: bytes) -> bytes:
    """One frame that says how large its content is."""
    return zstandard.ZstdCompressor(level=3).compress(data)


def unpack(data: bytes, limit_bytes: int) -> bytes:
    """Back from :func:`pack`.

    Raises:
        PackedError: it is no such frame, or its content is over the limit.
    """
    try:
        size_bytes = zstandard.get_frame_parameters(data).content_size
        if not 0 <= size_bytes <= limit_bytes:
            raise PackedError(f"its content is {size_bytes} bytes, the limit is {limit_bytes}")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise PackedError(str(error)) from error
