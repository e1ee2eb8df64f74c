"""A call to a store as people read it."""

from __future__ import annotations

__all__ = ["call_text"]


def call_text(verb: str, name: str, uri: str) -> str:
    """A call that may fail: "read 'a' in s3://b", "list the objects in s3://b".

    Args:
        verb: `write`, `create`, `read`, `list`, `delete`.
        name: of the object; of `list` what the names begin with, empty for all.
        uri: of the store.
    """
    if verb != "list":
        return f"{verb} {name!r} in {uri}"
    which = f" whose names begin with {name!r}" if name else ""
    return f"list the objects{which} in {uri}"
