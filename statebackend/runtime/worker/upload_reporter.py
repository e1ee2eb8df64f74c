"""How a background upload speaks to the coordinator."""

from __future__ import annotations

from snapshot.protocol.messages import PROTOCOL, BaseDone, BaseGrant, BaseRenewal
from snapshot.storage.counting_store import CountingStore
from statebackend.runtime.worker.background_upload import Uploaded
from statebackend.runtime.worker.participant import Participant

__all__ = ["UploadReporter"]


class UploadReporter:
    """Renews one grant, and reports what was uploaded under it.

    Args:
        counted: the store that the upload writes to.
    """

    def __init__(self, participant: Participant, grant: BaseGrant, counted: CountingStore) -> None:
        self._who, self._member = participant.who, participant.member
        self._grant, self._counted = grant, counted

    def renew(self) -> None:
        """The upload goes on."""
        self._report(given_up=False)

    def give_up(self, why: str, *, harmless: bool) -> None:
        """There will be no base under this grant."""
        self._report(given_up=True, why=why, harmless=harmless)

    def _report(self, *, given_up: bool, why: str = "", harmless: bool = False) -> None:
        request = BaseRenewal(
            protocol=PROTOCOL,
            job=self._who.job,
            session=self._member.session,
            operator=self._who.operator,
            subtask=self._who.subtask,
            grant=self._grant.id,
            given_up=given_up,
            why=why,
            harmless=harmless,
        )
        self._member.handler.base_renewed(request)

    def done(self, uploaded: Uploaded) -> None:
        """Everything is durable."""
        counts = self._counted.counts
        request = BaseDone(
            protocol=PROTOCOL,
            job=self._who.job,
            session=self._member.session,
            operator=self._who.operator,
            subtask=self._who.subtask,
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
        self._member.handler.base_done(request)
