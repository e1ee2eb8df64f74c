"""Clients of S3: one per process, built when first used, tuned for whole small objects.

A client that was made before a fork gives one child the body of another child's request, without
an error. So nothing here outlives a fork: every process id has its own lock and client.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import os
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

import botocore.credentials
import botocore.handlers
import botocore.session
import botocore.utils
from botocore.config import Config
from botocore.exceptions import ClientError, IncompleteReadError

from snapshot.storage.s3.s3_errors import CODED, DeadlinePassedError
from snapshot.storage.store_options import StoreOptions

__all__ = ["Clients", "is_amazons"]

TRIES = 5  # botocore's own, within one of ours


def is_amazons(endpoint_url: str) -> bool:
    """Whether an endpoint is Amazon's own."""
    host = urlsplit(endpoint_url).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


class _InProcess:
    """What one process has. Its lock was never held by a thread of another process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.client: Any = None


class Clients:
    """The current client of each process that this object reaches by fork."""

    def __init__(
        self, options: StoreOptions, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._clock_s = clock_s
        self._processes: dict[int, _InProcess] = {}
        self._thread = threading.local()

    def client(self) -> Any:
        """This process's client; threads share it."""
        mine = self._mine()
        with mine.lock:
            if mine.client is None:
                mine.client = self._build()
            return mine.client

    def renew(self, stale: Any) -> None:
        """Drop a client whose credentials ran out; the next one asks the whole chain again."""
        mine = self._mine()
        with mine.lock:
            if mine.client is stale:
                mine.client = None

    def _mine(self) -> _InProcess:
        # Dict operations only: a lock could have been held by another thread at the fork, for ever.
        # A parent's entry stays, as its sockets are the parent's to close.
        found = self._processes.get(os.getpid())
        return found or self._processes.setdefault(os.getpid(), _InProcess())

    def begin(self, deadline_s: float, told: Callable[[BaseException], None]) -> None:
        """A call of this thread begins.

        Args:
            deadline_s: botocore sends no request again after this time of the clock.
            told: of every failure that botocore sees, before it tries again.
        """
        self._thread.deadline_s = deadline_s
        self._thread.told = told
        self._thread.failure = None

    def _check_deadline(self, **_: object) -> None:
        failure = getattr(self._thread, "failure", None)  # None: this is the first try
        if failure is not None and self._clock_s() > self._thread.deadline_s:
            raise DeadlinePassedError(failure)

    def _note_failure(
        self,
        response: tuple[Any, dict[str, Any]] | None,
        caught_exception: BaseException | None,
        **_: object,
    ) -> None:
        """Remember what botocore is about to try again; a success is not kept, it has a body."""
        failure = caught_exception
        if response is not None and "Error" in response[1]:
            failure = ClientError(response[1], "")
        self._thread.failure = failure
        told = getattr(self._thread, "told", None)
        if failure is not None and told is not None:
            told(failure)

    def _build(self) -> Any:
        session = self._session()
        options = self._options
        config = Config(
            region_name=options.region or None,
            retries={"mode": "standard", "total_max_attempts": TRIES},
            connect_timeout=options.connect_timeout_s,
            read_timeout=options.read_timeout_s,
            max_pool_connections=options.max_connections,
            tcp_keepalive=True,
            # Records and slices carry digests of their own, checked on every read.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        # Twice, 5 ms each: where the client goes is only known once botocore has read its files.
        endpoint = urlsplit(self._create(session, config).meta.endpoint_url)
        s3: dict[str, object] = {}
        if endpoint.scheme == "https":
            s3["payload_signing_enabled"] = False  # TLS covers the body: no second pass over it
        if not is_amazons(endpoint.geturl()):
            s3["addressing_style"] = "path"  # bucket.host rarely resolves elsewhere
        client = self._create(session, config.merge(Config(s3=s3)))
        events = client.meta.events
        # An Expect header costs a round trip, and a second where a server does not answer it.
        events.unregister("before-call.s3", botocore.handlers.add_expect_header)
        events.register("before-call.s3.DeleteObjects", _add_md5)
        events.register("before-send.s3", self._check_deadline)
        events.register("before-parse.s3", _check_whole)
        events.register_first("needs-retry.s3", self._note_failure)
        return client

    def _create(self, session: Any, config: Config) -> Any:
        return session.create_client(
            "s3",
            endpoint_url=self._options.endpoint_url or None,
            verify=self._options.ca_bundle or None,
            config=config,
        )

    def _session(self) -> Any:
        session = _new_session()
        if self._options.role_arn:
            chain = session.get_component("credential_provider")
            chain.providers.insert(0, _AssumedRole(self._options))
        return session


class _AssumedRole(botocore.credentials.CredentialProvider):  # type: ignore[misc]
    """Credentials of a role, taken with those of the usual chain and renewed before they end."""

    METHOD = "statebackend-assumed-role"
    CANONICAL_NAME = None

    def __init__(self, options: StoreOptions) -> None:
        super().__init__()
        self._options = options

    def load(self) -> Any:
        own = _new_session()
        if self._options.ca_bundle:
            own.set_config_variable("ca_bundle", self._options.ca_bundle)
        if self._options.region:
            own.set_config_variable("region", self._options.region)
        source = own.get_credentials()
        if source is None:
            return None  # the chain goes on to say that there are none
        fetcher = botocore.credentials.AssumeRoleCredentialFetcher(
            client_creator=own.create_client,
            source_credentials=source,
            role_arn=self._options.role_arn,
            extra_args={"RoleSessionName": "statebackend"},
        )
        return botocore.credentials.DeferredRefreshableCredentials(
            refresh_using=fetcher.fetch_credentials, method=self.METHOD
        )


@functools.cache
def _descriptions() -> Any:
    """What botocore knows of S3, parsed once: a session costs 7 ms with them and 80 without.

    Plain data that nobody changes, so threads and forks may share it.
    """
    return botocore.session.Session().get_component("data_loader")


def _new_session() -> Any:
    session = botocore.session.Session()
    session.register_component("data_loader", _descriptions())
    parsers = session.get_component("response_parser_factory")
    parsers.set_parser_defaults(timestamp_parser=_timestamp)
    return session


def _timestamp(value: Any) -> datetime:
    """A time of an answer. botocore's own parser takes 60 us for each object of a listing."""
    if isinstance(value, str) and value.endswith("Z"):
        with contextlib.suppress(ValueError):
            return datetime.fromisoformat(value)
    found: datetime = botocore.utils.parse_timestamp(value)
    return found


# Answers that say something in a body, none of them in an empty one. Of objects' own bodies the
# store sees to it: they are streamed.
_SAYING = (
    "ListObjectsV2",
    "DeleteObjects",
    "CreateMultipartUpload",
    "CompleteMultipartUpload",
)


def _check_whole(operation_model: Any, response_dict: dict[str, Any], **_: object) -> None:
    """Refuse an answer whose body was lost, in whole or in part.

    botocore reads a lost body as an answer that says nothing: a listing of no objects, a deletion
    without errors, a refusal without a code. Raised past botocore's own tries, for ours.
    """
    body, status = response_dict["body"], response_dict["status_code"]
    if operation_model.name == "HeadObject" or not isinstance(body, bytes):
        return
    said = response_dict["headers"].get("Content-Length", "")
    encoded = "Content-Encoding" in response_dict["headers"]
    expected_bytes = int(said) if said.isdigit() and not encoded else len(body)
    if not body and (operation_model.name in _SAYING or status in CODED):
        expected_bytes = max(1, expected_bytes)
    if len(body) < expected_bytes:
        raise IncompleteReadError(actual_bytes=len(body), expected_bytes=expected_bytes)


def _add_md5(params: dict[str, Any], **_: object) -> None:
    """Older servers (radosgw, MinIO) want Content-MD5 on a bulk delete and know no CRC."""
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()
