"""How a background upload speaks to the coordinator."""

from __future__ import annotations

from typing import Protocol

from recovery.restore.upload import Uploaded
from snapshot.protocol.messages import PROTOCOL, BaseDone, BaseGrant, BaseRenewal, BaseReply
from snapshot.storage.counting import CountingStore
from statebackend.rpc.service import Endpoint

__all__ = ["UploadClient", "UploadReporter"]


class UploadClient(Protocol):
    """The coordinator, as an upload speaks to it (see :class:`statebackend.rpc.service.Client`)."""

    def base_done(self, endpoint: Endpoint, request: BaseDone, *, timeout_s: float) -> BaseReply:
        """Report a base that is durable."""

    def base_renewed(
        self, endpoint: Endpoint, request: BaseRenewal, *, timeout_s: float
    ) -> BaseReply:
        """Say that an upload goes on."""


class UploadReporter:
    """Renews one grant, and reports what was uploaded under it."""

    def __init__(
        self,
        client: UploadClient,
        endpoint: Endpoint,
        *,
        job: str,
        operator: str,
        subtask: int,
        grant: BaseGrant,
        counted: CountingStore,
        timeout_s: float,
    ) -> None:
        self._client, self._endpoint = client, endpoint
        self._job, self._operator, self._subtask = job, operator, subtask
        self._grant, self._counted = grant, counted
        self._timeout_s = timeout_s

    def renew(self) -> None:
        """The upload goes on."""
        self._say(given_up=False)

    def give_up(self, why: str, *, harmless: bool) -> None:
        """There will be no base under this grant."""
        self._say(given_up=True, why=why, harmless=harmless)

    def _say(self, *, given_up: bool, why: str = "", harmless: bool = False) -> None:
        request = BaseRenewal(
            protocol=PROTOCOL,
            job=self._job,
            session=self._endpoint.session,
            operator=self._operator,
            subtask=self._subtask,
            grant=self._grant.id,
            given_up=given_up,
            why=why,
            harmless=harmless,
        )
        self._client.base_renewed(self._endpoint, request, timeout_s=self._timeout_s)

    def done(self, uploaded: Uploaded) -> None:
        """Everything is durable."""
        counts = self._counted.counts
        request = BaseDone(
            protocol=PROTOCOL,
            job=self._job,
            session=self._endpoint.session,
            operator=self._operator,
            subtask=self._subtask,
            grant=self._grant.id,
            epoch=self._grant.epoch,
            chain=self._grant.chain,
            kind=uploaded.kind,
            part=uploaded.part,
            state_bytes=uploaded.state_bytes,
            uploaded_bytes=uploaded.uploaded_bytes,
            seconds=uploaded.seconds,
            requests={verb: (one.requests, one.size_bytes) for verb, one in counts.items()},
        )
        self._client.base_done(self._endpoint, request, timeout_s=self._timeout_s)
