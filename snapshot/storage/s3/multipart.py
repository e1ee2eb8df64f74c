"""Large files into S3: in parts, in constant memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from snapshot.storage.s3.s3_bodies import FileSlice
from snapshot.storage.s3.s3_errors import error_code, http_status, said
from snapshot.storage.s3.s3_retry import Retries
from statebackend.errors import StateBackendError

__all__ = ["SINGLE_PUT_BYTES", "Multipart"]

SINGLE_PUT_BYTES = 64 << 20
PART_BYTES = 16 << 20  # S3 wants at least 5 MiB in every part but the last
PARTS_LIMIT = 10_000
TOKEN = "statebackend-upload"


@dataclass(frozen=True, kw_only=True)
class Multipart:
    """One upload in parts.

    A process that dies here leaves parts that no listing shows and that cost money: buckets need a
    lifecycle rule that aborts incomplete uploads.

    Attributes:
        retries: how each request is tried again.
        target: `Bucket` and `Key`.
        name: of the object, for errors.
        sealing: arguments that ask for encryption.
        token: kept with the object, so that it is known whose upload it came from.
        threads: parts under way at a time.
    """

    retries: Retries
    target: dict[str, str]
    name: str
    sealing: dict[str, str]
    token: str
    threads: int = 1

    def send(self, handle: int, size_bytes: int, path: str | os.PathLike[str]) -> None:
        """Upload an open file; it is there when this returns, and aborted if this raises."""
        upload_id = self._call(
            lambda client: said(
                client.create_multipart_upload(
                    **self.target, **self.sealing, Metadata={TOKEN: self.token}
                ),
                "UploadId",
            )
        )
        try:
            parts = self._send_parts(upload_id, handle, size_bytes, path)
            self._call(lambda client: self._complete(client, upload_id, parts))
        except BaseException:
            self._abort(upload_id)
            raise

    def _send_parts(
        self, upload_id: str, handle: int, size_bytes: int, path: str | os.PathLike[str]
    ) -> list[dict[str, Any]]:
        part_bytes = max(PART_BYTES, -(-size_bytes // PARTS_LIMIT))

        def send(start: int) -> dict[str, Any]:
            length = min(part_bytes, size_bytes - start)
            number = start // part_bytes + 1
            answer = self._call(
                lambda client: client.upload_part(
                    **self.target,
                    UploadId=upload_id,
                    PartNumber=number,
                    Body=FileSlice(handle, start, length, path),
                )
            )
            return {"PartNumber": number, "ETag": said(answer, "ETag")}

        starts = range(0, size_bytes, part_bytes)
        if self.threads == 1:
            return [send(start) for start in starts]
        with ThreadPoolExecutor(self.threads, thread_name_prefix="s3-part") as pool:
            try:
                return list(pool.map(send, starts))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _complete(self, client: Any, upload_id: str, parts: list[dict[str, Any]]) -> None:
        try:
            answer = client.complete_multipart_upload(
                **self.target, UploadId=upload_id, MultipartUpload={"Parts": parts}
            )
            said(answer, "ETag")  # only with it is a 200 the end: it is sent before the work
        except ClientError as error:
            # The upload is gone when an earlier try did complete it and its answer was lost.
            if error_code(error) != "NoSuchUpload" or not self._is_there(client):
                raise

    def _is_there(self, client: Any) -> bool:
        try:
            answer = client.head_object(**self.target)
        except ClientError as error:
            if http_status(error) == 404:
                return False
            raise
        return bool(answer["Metadata"].get(TOKEN) == self.token)

    def _abort(self, upload_id: str) -> None:
        with contextlib.suppress(StateBackendError):
            self._call(
                lambda client: client.abort_multipart_upload(**self.target, UploadId=upload_id)
            )

    def _call(self, operation: Callable[[Any], Any]) -> Any:
        return self.retries.call("write", self.name, operation)
