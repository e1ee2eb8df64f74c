"""The uploads of a run's bases, by grant: what workers report of them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from snapshot.protocol.ack_checks import check_base_objects
from snapshot.protocol.base_leases import BaseBook, Grant
from snapshot.protocol.base_policy import BasePolicy
from snapshot.protocol.lineage import OperatorLineage
from snapshot.protocol.messages import BaseDone, BaseRenewal
from snapshot.protocol.running_job import RunningJob

__all__ = ["BaseUploads"]


class BaseUploads:
    """Of all operators of a run.

    Args:
        now_s, new_id: the driver's clock, and ids for grants.

    Attributes:
        policy: when a subtask writes its full state.
    """

    def __init__(
        self,
        run: RunningJob,
        policy: BasePolicy,
        now_s: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._run, self.policy = run, policy
        self._now_s, self._new_id = now_s, new_id

    def book(self, lineage: OperatorLineage, epoch: int) -> BaseBook:
        """The book of an operator that goes on from an epoch."""
        book = BaseBook(self.policy, self._now_s, self._new_id)
        book.remember(lineage, epoch, self._run.inline_budget_bytes)
        return book

    def done(self, done: BaseDone, objects: Collection[str] = ()) -> None:
        """A base was uploaded (its files: ``objects``); the operator's next record names it.

        Raises:
            StaleRequestError: its grant has lapsed. ForeignObjectError: see
                `snapshot.protocol.ack_checks`.
            ProtocolError: there is no such operator.
        """
        book = self._run.operator(done.operator).bases
        generation = self._run.generation
        check_base_objects(done, objects, generation, book.given(done.subtask, done.grant))
        book.finish(done)
        if done.state_bytes <= self._run.inline_budget_bytes:
            book.large_bytes.pop(done.subtask, None)  # it has shrunk, or was never large

    def renewed(self, renewal: BaseRenewal) -> float:
        """An upload goes on: how long its grant stands now. Raises as :meth:`done`."""
        book = self._run.operator(renewal.operator).bases
        if renewal.given_up:
            book.give_up(renewal.subtask, renewal.grant)
        else:
            book.renew(renewal.subtask, renewal.grant)
        return self.policy.lease_s

    def withdraw(self, uid: str, grant: Grant) -> None:
        """Take back a grant that its worker has not been told of."""
        self._run.operator(uid).bases.give_up(grant.subtask, grant.id)

    def open_grants(self) -> set[str]:
        """Grants under which bases are being uploaded, or wait for a record."""
        return set().union(*(one.bases.open_grants() for one in self._run.operators.values()))
