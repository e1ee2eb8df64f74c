"""What an HTTP request means to S3, and the error bodies that S3 answers with.

Path-style addresses only (`/bucket/key`): on loopback the clients use no other.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

__all__ = ["GROUPS", "READS", "WRITES", "Verb", "classify", "error_answer", "group_of"]

GROUPS = ("log/", "data/", "base/", "probe/")


class Verb(enum.StrEnum):
    """What a request asks for. `OTHER` is everything that this library's stores never send."""

    GET = "get"
    HEAD = "head"
    LIST = "list"
    PUT = "put"
    PUT_IF = "put_if"  # with If-None-Match or If-Match
    COPY = "copy"
    DELETE = "delete"
    DELETE_MANY = "delete_many"
    UPLOAD_CREATE = "upload_create"
    UPLOAD_PART = "upload_part"
    UPLOAD_COMPLETE = "upload_complete"
    UPLOAD_ABORT = "upload_abort"
    OTHER = "other"


READS = frozenset({Verb.GET, Verb.HEAD, Verb.LIST})
WRITES = frozenset(
    {Verb.PUT, Verb.PUT_IF, Verb.UPLOAD_PART, Verb.UPLOAD_CREATE, Verb.UPLOAD_COMPLETE}
)


def classify(method: str, target: str, header: Callable[[str], str | None]) -> tuple[Verb, str]:
    """The verb, and the key that it is about.

    Args:
        method: of the request line.
        target: of the request line: a path with its query.
        header: gives a header's value by its lower-case name.

    Returns:
        The key without the bucket; for a listing its prefix; empty for a DeleteObjects (whose keys
        stand in its body) and for what concerns the bucket. Never the query: a presigned one holds
        a signature.
    """
    path, _, query_text = target.partition("?")
    query = parse_qs(query_text, keep_blank_values=True)
    bucket, _, quoted_key = path.lstrip("/").partition("/")
    key = unquote(quoted_key)
    if not bucket:
        return Verb.OTHER, ""
    if not key:
        return _of_bucket(method, query)
    if "uploads" in query and method == "POST":
        return Verb.UPLOAD_CREATE, key
    if "uploadId" in query:
        verbs = {
            "PUT": Verb.UPLOAD_PART,
            "POST": Verb.UPLOAD_COMPLETE,
            "DELETE": Verb.UPLOAD_ABORT,
        }
        return verbs.get(method, Verb.OTHER), key
    if query.keys() & {"acl", "tagging", "attributes", "retention", "legal-hold", "torrent"}:
        return Verb.OTHER, key
    if method == "PUT":
        if header("x-amz-copy-source") is not None:
            return Verb.COPY, key
        conditional = header("if-none-match") is not None or header("if-match") is not None
        return (Verb.PUT_IF if conditional else Verb.PUT), key
    verbs = {"GET": Verb.GET, "HEAD": Verb.HEAD, "DELETE": Verb.DELETE}
    return verbs.get(method, Verb.OTHER), key


def _of_bucket(method: str, query: dict[str, list[str]]) -> tuple[Verb, str]:
    if method == "POST" and "delete" in query:
        return Verb.DELETE_MANY, ""
    listing = {"list-type", "prefix", "delimiter", "marker", "max-keys", "encoding-type"}
    if method == "GET" and query.keys() <= listing | {"continuation-token", "start-after"}:
        return Verb.LIST, query.get("prefix", [""])[-1]
    return Verb.OTHER, ""


def group_of(key: str) -> str:
    """The last of `GROUPS` that is a folder in the key; empty if none is.

    Keys have the store's own prefix in front, so `jobs/clicks/log/0001.ckpt` is of `log/`.
    """
    folders = key.split("/")[:-1]
    return next((f"{name}/" for name in reversed(folders) if f"{name}/" in GROUPS), "")


def error_answer(
    status: int, code: str, *, body: bytes | None = None, close: bool, head_only: bool
) -> bytes:
    """A whole response with S3's XML for an error.

    Args:
        status: of HTTP.
        code: S3's name for the error, such as `SlowDown`.
        body: instead of that XML.
        close: says that the connection ends with it.
        head_only: leaves the body out, as an answer to HEAD must.
    """
    body = body if body is not None else _error_xml(code)
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Injected"
    head = (
        f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/xml\r\n"
        f"Content-Length: {len(body)}\r\nx-amz-request-id: DRILL\r\n"
        + ("Connection: close\r\n" if close else "")
        + "\r\n"
    ).encode("latin-1")
    return head if head_only else head + body


def _error_xml(code: str) -> bytes:
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{escape(code)}</Code><Message>Injected by a drill.</Message>"
        "<RequestId>DRILL</RequestId></Error>"
    ).encode()
