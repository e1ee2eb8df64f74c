"""Who is uploading a subtask's full state, under which lease: decisions, no I/O.

Large state is written apart, in the background, by one worker under a *grant*: a lease that the
worker renews while it uploads. A grant that is not renewed has lapsed; what was uploaded under it
is garbage, and another may be given. A finished base waits for the operator's next record, which
names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from snapshot.protocol.base_policy import BasePolicy
from snapshot.protocol.lineage import OperatorLineage
from snapshot.protocol.messages import BaseDone, BeginRequest
from statebackend.errors import StaleRequestError

__all__ = ["BaseBook", "Grant"]


@dataclass
class Grant:
    """One subtask's right to upload a base of its state after ``epoch``.

    ``given``: the objects of the previous base that its worker was told of, and may name again.
    ``asked``: the request that it answers; the same request again gets the same grant.
    """

    id: str
    subtask: int
    epoch: int
    chain: str
    renewed_s: float
    given: frozenset[str] = frozenset()
    asked: BeginRequest | None = None


@dataclass
class BaseBook:
    """One operator's bases that are being made, or wait for a record.

    A base is given to one record only. With two records under way the second would name it too,
    although it is nobody's any more once the first is written, and may be deleted by then.

    Args:
        now_s: the driver's clock. new_id: names grants.

    Attributes:
        waiting: by subtask, for a record. in_record: by grant, in a record that is being written.
    """

    policy: BasePolicy
    now_s: Callable[[], float]
    new_id: Callable[[], str]
    grants: dict[int, Grant] = field(default_factory=dict)
    waiting: dict[int, BaseDone] = field(default_factory=dict)
    in_record: dict[str, BaseDone] = field(default_factory=dict)
    large_bytes: dict[int, int] = field(default_factory=dict)

    def remember(self, lineage: OperatorLineage, epoch: int, budget_bytes: int) -> None:
        """Take from the bases in the log which subtasks' state is large."""
        for index, subtask in enumerate(lineage.subtasks):
            base = subtask.base_before(epoch)
            if base is not None and base.entry.state_bytes > budget_bytes:
                self.large_bytes[index] = base.entry.state_bytes

    def grant(self, subtask: int, epoch: int, chain: str, asked: BeginRequest) -> Grant | None:
        """The right to upload a base; None where enough are being uploaded.

        Args:
            asked: the request that is answered; the same one again gets the same grant.
        """
        self._lapse()
        in_record = {done.subtask for done in self.in_record.values()}
        held = self.grants.get(subtask)
        if held is not None:
            # The same request comes again where its answer was lost.
            return held if held.asked == asked else None
        if subtask in self.waiting or subtask in in_record:
            return None
        if len(self.grants) >= self.policy.open_limit:
            return None
        given = Grant(self.new_id(), subtask, epoch, chain, self.now_s(), asked=asked)
        self.grants[subtask] = given
        return given

    def renew(self, subtask: int, grant_id: str) -> None:
        """The upload goes on.

        Raises:
            StaleRequestError: the grant has lapsed: what was uploaded may be deleted already.
        """
        self._held(subtask, grant_id).renewed_s = self.now_s()

    def give_up(self, subtask: int, grant_id: str) -> None:
        """The upload has ended without a base. Raises as :meth:`renew`."""
        self._held(subtask, grant_id)
        del self.grants[subtask]

    def given(self, subtask: int, grant_id: str) -> frozenset[str]:
        """The objects that came with a grant. Raises as :meth:`renew`."""
        return self._held(subtask, grant_id).given

    def finish(self, done: BaseDone) -> None:
        """The upload is durable; the next record will name it.

        Raises:
            StaleRequestError: the grant has lapsed, or the base is of another state.
        """
        held = self._held(done.subtask, done.grant)
        del self.grants[done.subtask]
        if (done.epoch, done.chain) != (held.epoch, held.chain):
            raise StaleRequestError(
                f"The base of subtask {done.subtask} is not of the state that it was granted for.",
                todo="Nothing to do: it is not used, and cleaned up.",
            )
        self.waiting[done.subtask] = done

    def take(self) -> dict[int, BaseDone]:
        """The bases that wait, by subtask: for a record that is about to be written."""
        taken, self.waiting = self.waiting, {}
        self.in_record.update((done.grant, done) for done in taken.values())
        return taken

    def written(self, named: dict[int, BaseDone]) -> None:
        """The record that took these is durable."""
        for done in named.values():
            self.in_record.pop(done.grant, None)

    def unnamed(self) -> list[BaseDone]:
        """Bases whose objects no durable record names yet."""
        return [*self.waiting.values(), *self.in_record.values()]

    def open_grants(self) -> set[str]:
        """Grants whose objects must not be deleted although no record names them yet."""
        self._lapse()
        return {g.id for g in self.grants.values()} | {done.grant for done in self.unnamed()}

    def _held(self, subtask: int, grant_id: str) -> Grant:
        self._lapse()
        held = self.grants.get(subtask)
        if held is None or held.id != grant_id:
            raise StaleRequestError(
                f"The right to upload a base of subtask {subtask} has lapsed.",
                todo="Nothing to do: another upload will be made.",
            )
        return held

    def _lapse(self) -> None:
        oldest_s = self.now_s() - self.policy.lease_s
        for subtask in [s for s, g in self.grants.items() if g.renewed_s < oldest_s]:
            del self.grants[subtask]
