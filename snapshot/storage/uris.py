"""What a store's URI may say, and where a job lies below it.

A job's folder is one part of the path, the same in every kind of store and however the URI is
written: the job's name, percent-encoded. What stays as it is: ASCII letters, digits, `_`, `-`, `~`,
and `.` but at the beginning, where it would hide the folder.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote

from snapshot.storage.object_store import PART_LIMIT_BYTES, is_name
from statebackend.errors import SettingError

__all__ = ["SAVEPOINTS_FOLDER", "folder_name", "job_folder", "parse_s3_uri", "refuse_secrets"]

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


def folder_name(job: str) -> str:
    """The name of a job's folder, below the folder of all jobs.

    Raises:
        SettingError: the name is empty, nothing but dots, too long, or no Unicode.
    """
    if not job.strip("."):
        raise SettingError(f"The job's name is {job!r}.", todo="Give the job a name.")
    try:
        name = quote(job, safe="")
    except UnicodeEncodeError:
        raise SettingError(
            f"The job's name {job!r} is no Unicode: half of a surrogate pair is in it.",
            todo="Give the job another name.",
        ) from None
    if name.startswith("."):
        name = f"%2E{name[1:]}"
    if len(name) > PART_LIMIT_BYTES:
        raise SettingError(
            f"The job's name {job[:80]!r} is too long: its folder's would be of {len(name)} bytes, "
            f"over {PART_LIMIT_BYTES}.",
            todo="Give the job a shorter name; all but ASCII letters and digits take 3 bytes each "
            "or more.",
        )
    return name


def job_folder(uri: str, job: str) -> str:
    """The URI of a job's own folder, for `open_store`.

    Args:
        uri: of the folder of all jobs.

    Raises:
        SettingError: as `folder_name`.
    """
    name = folder_name(job)
    if uri.startswith("file:"):  # the one form that is decoded when it is opened
        name = quote(name, safe="")
    return f"{uri.rstrip('/')}/{name}"
