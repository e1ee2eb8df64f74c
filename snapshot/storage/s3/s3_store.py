"""A store in a bucket of S3, or of a server that speaks its protocol.

What S3 promises and this rests on: a PUT or a completed upload appears whole or not at all; a read
or listing after a write sees it; of all PUTs with `If-None-Match: *` of one key, one succeeds.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from botocore.exceptions import ClientError, IncompleteReadError

from snapshot.storage.files_to_upload import opened_file
from snapshot.storage.object_store import (
    CHUNK_BYTES,
    NAME_LIMIT_BYTES,
    Buffer,
    Capabilities,
    CreateOutcome,
    Listing,
    ObjectInfo,
    ObjectStore,
    check_chunk,
    check_name,
    check_prefix,
    check_range,
    checked_names,
    is_name,
)
from snapshot.storage.s3.multipart import SINGLE_PUT_BYTES, Multipart
from snapshot.storage.s3.s3_bodies import FileSlice, body_of
from snapshot.storage.s3.s3_client import Clients
from snapshot.storage.s3.s3_errors import CALL_ERRORS, error_code, http_status, said
from snapshot.storage.s3.s3_retry import Retries, Trying
from snapshot.storage.store_options import StoreOptions
from statebackend.errors import SettingError, StoreUnreachableError

__all__ = ["S3Store"]

DELETE_LIMIT = 1000  # keys in one DeleteObjects
# How servers without suffix ranges may answer, besides 416.
NO_SUFFIX_RANGES = ("InvalidArgument", "InvalidRange", "NotImplemented")


class S3Store(ObjectStore):
    """Objects below a prefix of a bucket.

    The client is built when first used, once in each process. One request per call, but for
    listings (one per 1,000 objects), deletions (likewise) and files over 64 MiB (parts).

    `create` may answer EXISTS to the very caller that made the object: an answer was lost and
    botocore sent the request again. Whoever must know reads the object back.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        new_id: Callable[[], str],
        options: StoreOptions | None = None,
    ) -> None:
        """Open, without a request.

        Args:
            bucket: its name.
            prefix: of every key; without a '/' at its end; may be empty.
            new_id: gives a new id on every call; marks uploads in parts.
            options: how the store is reached.
        """
        self._options = options or StoreOptions()
        self._uri = f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"
        self._bucket = bucket
        self._base = f"{prefix}/" if prefix else ""
        self._new_id = new_id
        self._retries = Retries(
            Clients(self._options), uri=self._uri, deadline_s=self._options.deadline_s
        )
        # Learnt from refusals; a race between threads costs a request, no more.
        self._suffix_ranges = True
        self._bulk_deletes = True

    @property
    def uri(self) -> str:
        """`s3://bucket/prefix`."""
        return self._uri

    @property
    def capabilities(self) -> Capabilities:
        """Everything; a server that ignores conditions shows at the probe."""
        return Capabilities(create_if_absent=True, ranged_read=True)

    def limited(self, deadline_s: float) -> AbstractContextManager[None]:
        """Calls of this thread inside try for so long at most."""
        return self._retries.limited(deadline_s)

    def take_retries(self) -> int:
        """As :meth:`ObjectStore.take_retries`."""
        return self._retries.take()

    # --- writing -----------------------------------------------------------------------------

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """One PUT."""
        target = self._target(name)
        self._retries.call(
            "write",
            name,
            lambda client: client.put_object(**target, **self._sealing(), Body=body_of(parts)),
        )

    def put_file(self, name: str, path: str | os.PathLike[str]) -> None:
        """One PUT up to 64 MiB, an upload in parts beyond."""
        target = self._target(name)
        with opened_file(path) as (handle, size_bytes):
            if size_bytes > SINGLE_PUT_BYTES:
                upload = Multipart(
                    retries=self._retries,
                    target=target,
                    name=name,
                    sealing=self._sealing(),
                    token=self._new_id(),
                    threads=self._options.upload_threads,
                )
                upload.send(handle, size_bytes, path)
                return
            self._retries.call(
                "write",
                name,
                lambda client: client.put_object(
                    **target, **self._sealing(), Body=FileSlice(handle, 0, size_bytes, path)
                ),
            )

    def create(self, name: str, parts: Sequence[Buffer]) -> CreateOutcome:
        """One PUT with `If-None-Match: *`; never in parts, where some servers ignore that."""
        target = self._target(name)

        def once(client: Any) -> CreateOutcome:
            try:
                client.put_object(**target, **self._sealing(), Body=body_of(parts), IfNoneMatch="*")
            except ClientError as error:
                if http_status(error) != 412:
                    raise
                return CreateOutcome.EXISTS
            return CreateOutcome.CREATED

        return self._retries.call("create", name, once)

    # --- reading -----------------------------------------------------------------------------

    def get(self, name: str) -> bytes:
        """One GET; a body that breaks off is asked for again."""
        target = self._target(name)
        return self._retries.call("read", name, lambda client: _read(client.get_object(**target)))

    def get_chunks(self, name: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """One GET; a body that breaks off is continued from the piece that broke."""
        check_chunk(chunk_bytes)
        return self._chunks(name, self._target(name), chunk_bytes)

    def _chunks(self, name: str, target: dict[str, str], chunk_bytes: int) -> Iterator[bytes]:
        trying = Trying(self._retries, "read", name)
        position, size_bytes, version = 0, -1, None
        while position != size_bytes:
            client = trying.client()
            try:
                wanted = {"Range": f"bytes={position}-"} if position else {}
                answer = client.get_object(**target, **wanted)
                # Compared here and not by If-Match, which radosgw reads in a way of its own.
                with contextlib.closing(answer["Body"]) as body:
                    if version not in (None, answer["ETag"]):
                        raise self._replaced(name)
                    version = answer["ETag"]
                    ignored_range = position and "ContentRange" not in answer
                    size_bytes = said(answer, "ContentLength") + (0 if ignored_range else position)
                    if ignored_range:
                        _skip(body, position)
                    while position < size_bytes:
                        chunk = _exactly(body, min(chunk_bytes, size_bytes - position))
                        position += len(chunk)
                        trying.progressed()
                        yield chunk
            except CALL_ERRORS as error:
                trying.failed(error)

    def _replaced(self, name: str) -> StoreUnreachableError:
        return StoreUnreachableError(
            f"The object {name!r} in {self._uri} was replaced while it was read.",
            todo="Read it again.",
        )

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """One GET of a range."""
        check_range(start, length)
        target = self._target(name)

        def once(client: Any) -> bytes:
            try:
                answer = client.get_object(**target, Range=f"bytes={start}-{start + length - 1}")
            except ClientError as error:
                if http_status(error) != 416:
                    raise
                return b""  # the object ends before
            body = _read(answer)
            return body if "ContentRange" in answer else body[start : start + length]

        return self._retries.call("read", name, once)

    def get_tail(self, name: str, length: int) -> tuple[bytes, int]:
        """One GET of a suffix range; two where the server refuses that."""
        check_range(0, length)
        target = self._target(name)

        def once(client: Any) -> tuple[bytes, int]:
            if self._suffix_ranges:
                try:
                    return _tail(client.get_object(**target, Range=f"bytes=-{length}"), length)
                except ClientError as error:
                    if http_status(error) != 416 and error_code(error) not in NO_SUFFIX_RANGES:
                        raise
            return self._tail_by_size(client, target, length)

        return self._retries.call("read", name, once)

    def _tail_by_size(self, client: Any, target: dict[str, str], length: int) -> tuple[bytes, int]:
        try:
            found = client.head_object(**target)
        except ClientError as error:
            if http_status(error) != 404:
                raise
            # It has no body that would tell a missing object from a missing bucket.
            return _tail(client.get_object(**target), length)
        size_bytes = said(found, "ContentLength")
        if size_bytes == 0:  # S3 itself has no range of an empty object
            return b"", 0
        self._suffix_ranges = self._suffix_ranges and size_bytes < length
        start = max(0, size_bytes - length)
        answer = client.get_object(**target, Range=f"bytes={start}-{size_bytes - 1}")
        if answer["ETag"] != found["ETag"]:
            raise ConnectionResetError("replaced between two requests")  # so it is tried again
        return _tail(answer, length)

    # --- listing and deleting ----------------------------------------------------------------

    def list(self, prefix: str) -> Listing:
        """One request per 1,000 objects; keys that are no names of ours are left out."""
        check_prefix(prefix)
        found: Listing = []
        further: dict[str, str] = {}
        while True:
            answer = self._page(prefix, further)
            for item in answer.get("Contents", []):
                name = item["Key"][len(self._base) :]
                if is_name(name):
                    modified_ms = round(item["LastModified"].timestamp() * 1000)
                    found.append(ObjectInfo(name, item["Size"], modified_ms))
            if not answer["IsTruncated"]:
                return sorted(found)
            further = {"ContinuationToken": answer["NextContinuationToken"]}

    def _page(self, prefix: str, further: dict[str, str]) -> dict[str, Any]:
        wanted = {"Bucket": self._bucket, "Prefix": self._base + prefix, **further}

        def once(client: Any) -> dict[str, Any]:
            answer: dict[str, Any] = client.list_objects_v2(**wanted)
            # Nothing else tells a listing of no objects from an answer that is no listing.
            if said(answer, "IsTruncated"):
                said(answer, "NextContinuationToken")
            return answer

        return self._retries.call("list", prefix, once)

    def delete(self, names: Iterable[str]) -> None:
        """One request per 1,000 names; repeated as a whole if its answer was lost.

        Raises:
            StoreUnreachableError: some could not be deleted; says which and why.
        """
        wanted = checked_names(dict.fromkeys(names))
        for start in range(0, len(wanted), DELETE_LIMIT):
            self._delete_some(wanted[start : start + DELETE_LIMIT])

    def _delete_some(self, names: Sequence[str]) -> None:
        def once(client: Any) -> None:
            if self._bulk_deletes:
                try:
                    self._delete_at_once(client, names)
                    return
                except ClientError as error:
                    if http_status(error) not in (405, 501):
                        raise
                    self._bulk_deletes = False
            for name in names:
                client.delete_object(**self._target(name))

        self._retries.call("delete", names[0], once)

    def _delete_at_once(self, client: Any, names: Sequence[str]) -> None:
        objects = [{"Key": self._base + name} for name in names]
        answer = client.delete_objects(
            Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True}
        )
        left = [item for item in answer.get("Errors", []) if item.get("Code") != "NoSuchKey"]
        if left:
            told = "; ".join(
                f"{item.get('Key')}: {item.get('Code')} {item.get('Message', '')}"
                for item in left[:3]
            )
            message = f"{len(left)} of {len(names)} objects are left: {told}"
            # As an error of the request, so that what may pass is tried again.
            detail = {"Code": left[0].get("Code", ""), "Message": message}
            raise ClientError(
                {"Error": detail, "ResponseMetadata": {"HTTPStatusCode": 200}}, "DeleteObjects"
            )

    # --- arguments ---------------------------------------------------------------------------

    def _target(self, name: str) -> dict[str, str]:
        check_name(name)
        key = self._base + name
        if len(key.encode()) > NAME_LIMIT_BYTES:
            raise SettingError(
                f"The object name {name[:80]!r} is refused: with the prefix of {self._uri} it is "
                f"over {NAME_LIMIT_BYTES} bytes.",
                todo="Use a shorter prefix.",
            )
        return {"Bucket": self._bucket, "Key": key}

    def _sealing(self) -> dict[str, str]:
        given = {
            "ServerSideEncryption": self._options.sse,
            "SSEKMSKeyId": self._options.kms_key_id,
        }
        return {name: value for name, value in given.items() if value}


def _read(answer: dict[str, Any]) -> bytes:
    with contextlib.closing(answer["Body"]) as body:
        return _exactly(body, said(answer, "ContentLength"))


def _exactly(body: Any, length: int) -> bytes:
    """The next bytes of a body; one that ends early is an error that is tried again."""
    chunk: bytes = body.read(length) if length else b""
    if len(chunk) != length:
        raise IncompleteReadError(actual_bytes=len(chunk), expected_bytes=length)
    return chunk


def _skip(body: Any, length: int) -> None:
    while length:
        length -= len(_exactly(body, min(length, CHUNK_BYTES)))


def _tail(answer: dict[str, Any], length: int) -> tuple[bytes, int]:
    body = _read(answer)
    if "ContentRange" not in answer:  # the server sent all of it
        return body[-length:], len(body)
    return body, int(answer["ContentRange"].rpartition("/")[2])
