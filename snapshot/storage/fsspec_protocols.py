"""What is known of the places that fsspec reaches: their sources and documents, August 2026.

Nothing is assumed of a protocol that is not here. `probe` checks what is claimed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Protocol", "Publish", "protocol_named"]


class Publish(enum.Enum):
    """How a whole object gets its name."""

    AT_ONCE = "at once"  # an upload shows when it is complete: what object stores do
    MOVE = "move"  # written beside, then moved over the name in one step
    TORN = "torn"  # neither: a reader may see the beginning of an object


@dataclass(frozen=True)
class Protocol:
    """One protocol.

    Attributes:
        publish: how objects are written.
        creates: `pipe_file(mode="create")` is one conditional request that the server decides.
        why: why it does not create; empty if it does.
    """

    publish: Publish
    creates: bool = False
    why: str = ""


# gcsfs sends ifGenerationMatch=0 with simple and resumable uploads, and turns 412 into
# FileExistsError (since 2024.12; "experimental", say its docs).
_GOOGLE = Protocol(Publish.AT_ONCE, creates=True)
# adlfs uploads with overwrite=False: If-None-Match: * on Put Blob and on Put Block List; 409
# becomes FileExistsError (since 2024.12).
_AZURE = Protocol(Publish.AT_ONCE, creates=True)
# posix_rename replaces in one step. An exclusive open would show the name before the bytes.
_SFTP = Protocol(
    Publish.MOVE, why="SFTP has no step that names a whole file only if the name is free"
)
_CHECK_FIRST = "fsspec looks whether the object is there and then writes, in two steps"

_PROTOCOLS = {
    "gs": _GOOGLE,
    "gcs": _GOOGLE,
    "abfs": _AZURE,
    "abfss": _AZURE,
    "az": _AZURE,
    "sftp": _SFTP,
    "ssh": _SFTP,
    # In our own tests only: open_store gives local paths and memory:// to stores of our own.
    "file": Protocol(Publish.MOVE, why="fsspec's local files are created before they are whole"),
    "memory": Protocol(Publish.AT_ONCE, why=_CHECK_FIRST),
    # Object stores of which only this is known: an upload shows when it is complete.
    "oss": Protocol(Publish.AT_ONCE, why=_CHECK_FIRST),
    "tos": Protocol(Publish.AT_ONCE, why=_CHECK_FIRST),
    "oci": Protocol(Publish.AT_ONCE, why=_CHECK_FIRST),
    # Its rename does not replace, and what is being written shows under its name.
    "hdfs": Protocol(Publish.TORN, why="Arrow's HDFS has no exclusive open"),
    "webhdfs": Protocol(Publish.TORN, why=_CHECK_FIRST),
}


def protocol_named(name: str) -> Protocol:
    """What is known of a protocol; the least, if it is not in the table."""
    unknown = f"whether {name}:// has an atomic create-if-absent is not known"
    return _PROTOCOLS.get(name, Protocol(Publish.TORN, why=unknown))
