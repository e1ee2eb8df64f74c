"""What a store's URI may say."""

from __future__ import annotations

import re
from typing import Final

from snapshot.storage.object_store import is_name
from statebackend.errors import SettingError

__all__ = ["SAVEPOINTS_FOLDER", "parse_s3_uri", "refuse_secrets"]

SAVEPOINTS_FOLDER: Final = ".savepoints"  # the one hidden folder that a store may lie in

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+")


def refuse_secrets(uri: str) -> None:
    """Raises `SettingError`, which does not repeat the URI, if a password may be in it."""
    scheme, _, rest = uri.partition("://")
    user, at, _ = rest.partition("/")[0].rpartition("@")
    if at and ":" in user:
        raise SettingError(
            f"The URI of the {scheme!r} store holds credentials.",
            todo="Leave them out: each process takes its own from its environment.",
        )


def parse_s3_uri(uri: str) -> tuple[str, str]:
    """Bucket and prefix (without a '/' at its end; may be empty) of `s3://bucket/prefix`.

    The prefix is taken as it stands: nothing is percent-decoded.

    Raises:
        SettingError: what is wrong with it.
    """
    refuse_secrets(uri)
    _, slashes, rest = uri.partition("://")
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket:
        raise SettingError(
            "The URI of the 's3' store names a user before its bucket.",
            todo="Leave that out: credentials come from boto3's chain in each process.",
        )
    if not slashes or not _BUCKET.fullmatch(bucket) or ".." in bucket or _ADDRESS.fullmatch(bucket):
        raise SettingError(
            f"The store {uri!r} names no valid bucket.",
            todo="Use s3://bucket/prefix; an endpoint goes into the store options.",
        )
    prefix = prefix.rstrip("/")
    shown = "/".join(part for part in prefix.split("/") if part != SAVEPOINTS_FOLDER)
    if prefix and not is_name(shown or "-"):
        raise SettingError(
            f"The store {uri!r} has a prefix that is no valid object name.",
            todo="Use parts joined by single '/', none of them starting with '.'.",
        )
    return bucket, prefix
