"""One run of a continuous job, as its driver decides it: a state machine over what slots say.

It is told what happens and that time passes, and answers with what is to be done, in order. It
knows no thread, no clock and no store. A run begins when every slot has registered, takes its first
checkpoint once every subtask runs, and is over with the checkpoint after which nobody has anything
to do, or with the first failure; whether the job is then started again is not decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from snapshot.barriers import pending_checkpoints as cp
from snapshot.barriers.checkpoint_trigger import Kind, Request, Trigger
from snapshot.barriers.pending_checkpoints import Checkpoints, Reason, Subtask
from snapshot.barriers.tolerable_failures import Failures
from statebackend.continuous.driver.effect_types import (
    Broken,
    Ended,
    Out,
    Publish,
    Send,
    Settled,
    Write,
    named,
)
from statebackend.continuous.driver.run_slots import RunSlots
from statebackend.continuous.driver.split_grants import SplitGrants
from statebackend.continuous.job.graph import Graph
from statebackend.continuous.job.job_options import RunOptions
from statebackend.continuous.job.slot_messages import (
    Aborted,
    Acked,
    Completed,
    Copy,
    Declined,
    Deploy,
    Peer,
    Stop,
)
from statebackend.continuous.job.slot_messages import Trigger as Tripped
from statebackend.continuous.sources.source import Discovery
from statebackend.continuous.sources.split_assigner import SplitAssigner
from statebackend.errors import CheckpointsFailedError, StateBackendError
from statebackend.runtime.driver.job_status import UnderWay

__all__ = ["Broken", "Ended", "Out", "Publish", "RunState", "Send", "Settled", "Write"]


@dataclass
class _Attempt:
    request: Request
    began_s: float
    cuts: dict[str, bytes]
    parts: Mapping[Subtask, Acked] | None = None
    waiting: frozenset[Subtask] = frozenset()  # when it was given up


class RunState:
    """See the module.

    Attributes:
        slots: told who is heard of. splits: asked for splits, and told of their ends.

    Args:
        graph: the job. options: of its start.
        assigners: of the sources, by vertex, restored.
        epoch: of the last complete checkpoint. before: the highest attempt's number so far.
        stamp_ms: of the epoch that the run begins with. watermarks_ms: see `Deploy`.
        in_flight: by subtask: see `Deploy`.
        now_s: of every method: seconds that never go back.
        wall_ms: of some: milliseconds since 1970.
    """

    def __init__(
        self,
        graph: Graph,
        options: RunOptions,
        assigners: Mapping[str, SplitAssigner],
        *,
        epoch: int,
        before: int,
        stamp_ms: int,
        now_s: float,
        watermarks_ms: Mapping[str, int] | None = None,
        in_flight: Mapping[int, dict[str, list[bytes]]] | None = None,
    ) -> None:
        self._graph, self._options = graph, options
        self.slots = RunSlots(graph, options, now_s)
        self.splits = SplitGrants(graph, assigners, self.slots)
        self._stamp_ms = stamp_ms
        self._watermarks_ms = dict(watermarks_ms or {})
        self._in_flight = in_flight or {}
        self._checkpoints: Checkpoints[Acked] = Checkpoints(
            graph.subtasks, epoch=epoch, before=before, timeout_s=options.timeout_s
        )
        self._trigger: Trigger | None = None
        self._failures = Failures(options.tolerable_failures)
        self._attempts: dict[int, _Attempt] = {}
        self._publishing = False
        self._unwritten: list[Out] = []  # the attempt after the one whose output is committed
        self._asked: list[Kind] = []  # by users, before the run was up
        self._over = False

    # --- what is seen --------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Of the last complete checkpoint."""
        return self._checkpoints.epoch

    @property
    def number(self) -> int:
        """Of the newest attempt."""
        return self._checkpoints.number

    @property
    def running(self) -> bool:
        """Whether every subtask has its state."""
        return self._trigger is not None and not self._over

    @property
    def has_run(self) -> bool:
        """Whether every subtask has had its state, also after the run is over."""
        return self._trigger is not None

    def under_way(self) -> UnderWay | None:
        """The oldest checkpoint that is not complete; from any thread, while others are at work."""
        number = next(iter(self._checkpoints.pending), None)
        attempt = self._attempts.get(number) if number is not None else None
        if number is None or attempt is None:
            return None
        missing: dict[str, list[int]] = {vertex: [] for vertex in self._graph.vertices}
        for one in self._checkpoints.waiting_for(number):
            missing[one.vertex].append(one.index)
        return UnderWay(
            epoch=self._checkpoints.epoch + 1,
            began_s=attempt.began_s,
            missing={vertex: sorted(found) for vertex, found in missing.items()},
            parallelism=dict.fromkeys(missing, self._graph.parallelism),
            writing=attempt.parts is not None,
        )

    # --- slots and splits ----------------------------------------------------------------------

    def registered(
        self, slot: int, peer: Peer, now_s: float, copies: Sequence[Copy] = ()
    ) -> list[Out]:
        """A slot is there; with the last one each is told which subtasks it has."""
        try:
            complete = self.slots.registered(slot, peer, now_s, copies)
        except StateBackendError as error:
            return self._break(error)
        if not complete:
            return []
        deploy = Deploy(
            subtask=-1,
            peers=self.slots.peers,
            epoch=self._checkpoints.epoch + 1,
            stamp_ms=self._stamp_ms,
            watermarks_ms=self._watermarks_ms,
        )
        given = sorted((slot, subtask) for subtask, slot in self.slots.slot_of.items())
        return [
            Send(slot, msgspec.structs.replace(deploy, subtask=subtask, in_flight=in_flight))
            for slot, subtask in given
            for in_flight in [self._in_flight.get(subtask, {})]
        ]

    def started(self, subtask: Subtask, now_s: float) -> list[Out]:
        """A subtask has its state and its channels."""
        if not self.slots.started(subtask) or self._trigger is not None or self._over:
            return []
        self._trigger = Trigger(self._options.policy, now_s)
        for kind in self._asked:
            self._trigger.request(kind, now_s)
        return []

    def failed(self, error: StateBackendError) -> list[Out]:
        """A subtask, a slot or something of the driver's has failed."""
        return self._break(error)

    def discovered(self, vertex: str, found: Discovery) -> list[Out]:
        """A source has looked for splits."""
        try:
            self.splits.assigners[vertex].add(found)
        except StateBackendError as error:
            return self._break(error)
        return []

    # --- checkpoints ---------------------------------------------------------------------------

    def requested(self, kind: Kind, now_s: float) -> bool:
        """A user wants a checkpoint; one that has not begun serves all who want its kind.

        Returns:
            False: too many wait already.
        """
        if self._trigger is None:
            if kind not in self._asked:
                self._asked.append(kind)
            return True
        if any(one.kind == kind and not one.periodic for one in self._trigger.queued):
            return True
        return self._trigger.request(kind, now_s) is not None

    def acked(self, acked: Acked, now_s: float) -> list[Out]:
        """A subtask's part is safe."""
        subtask = Subtask(acked.vertex, acked.subtask)
        out: list[Out] = [*self.splits.passed(subtask, acked.checkpoint)]
        done = self._checkpoints.ack(subtask, acked.checkpoint, acked, ended=acked.ended)
        return out + self._follow(done, now_s)

    def declined(self, declined: Declined, now_s: float) -> list[Out]:
        """A subtask has no part for a checkpoint."""
        subtask = Subtask(declined.vertex, declined.subtask)
        reason = Reason.NEWER if declined.newer else Reason.DECLINED
        self._note_missing()
        return self._follow(self._checkpoints.decline(subtask, declined.checkpoint, reason), now_s)

    def at_end(self, subtask: Subtask) -> None:
        """A subtask has come to its end."""
        self._checkpoints.at_end(subtask)

    def written(self, checkpoint: int, now_s: float) -> list[Out]:
        """The records of a checkpoint are durable."""
        return self._follow(self._checkpoints.committed(checkpoint), now_s)

    def published(self, done: Publish, now_s: float, wall_ms: int) -> list[Out]:
        """The output of a checkpoint is committed."""
        attempt = self._attempts.pop(done.checkpoint)
        self._publishing, next_one, self._unwritten = False, self._unwritten, []
        for assigner in self.splits.assigners.values():
            assigner.complete(done.checkpoint)
        self._failures.succeeded(done.checkpoint)
        self._stamp_ms = max(wall_ms, self._stamp_ms + 1)
        told = Completed(checkpoint=done.checkpoint, epoch=done.epoch, next_stamp_ms=self._stamp_ms)
        out: list[Out] = [Send(None, told)]
        if self._trigger is not None:
            self._trigger.ended(attempt.request, now_s)
        took_s = now_s - attempt.began_s
        out.append(Settled(done.checkpoint, done.epoch, None, took_s, attempt.request))
        if done.is_last:
            self._over = True
            return [*out, Send(None, Stop(job_ended=True)), Ended()]
        return out + next_one

    @property
    def stamp_ms(self) -> int:
        """Of the epoch that the next complete checkpoint will be."""
        return self._stamp_ms

    def tick(self, now_s: float, wall_ms: int) -> list[Out]:
        """Time has passed: whoever is silent is lost, and checkpoints begin or expire."""
        if self._over:
            return []
        lost = self.slots.lost(now_s)
        if lost is not None:
            return self._break(lost)
        if self._trigger is None:
            return []
        deadline_s = self._checkpoints.next_deadline_s
        if deadline_s is not None and deadline_s <= now_s:
            self._note_missing()
        out = self._follow(self._checkpoints.tick(now_s), now_s)
        if self._checkpoints.last_is_due and not self._trigger.running:
            self._trigger.request("checkpoint", now_s)
        while not self._none_may_begin() and (begins := self._trigger.poll(now_s, most=1)):
            out += self._begin(begins[0], now_s, wall_ms)
        return out

    # --- how -----------------------------------------------------------------------------------

    def _none_may_begin(self) -> bool:
        """Whether run or job end; or a subtask waits for a split until a barrier is through.

        With one barrier always on its way it would never get one.
        """
        return self._over or self._checkpoints.is_ending or self.splits.wait_for_barrier()

    def _begin(self, request: Request, now_s: float, wall_ms: int) -> list[Out]:
        # Before any barrier goes out: what is cut here nobody has.
        number = self._checkpoints.number + 1
        cuts = {vertex: one.cut(number) for vertex, one in self.splits.assigners.items()}
        self._attempts[number] = _Attempt(request, now_s, cuts)
        timeout_ms = self._options.alignment_timeout_ms
        began = self._checkpoints.begin(
            now_s, stamp_ms=wall_ms, kind=request.kind, alignment_timeout_ms=timeout_ms
        )
        return self._follow(began, now_s)

    def _note_missing(self) -> None:
        """Before an attempt may be given up: afterwards nobody knows who had not acked."""
        for number in self._checkpoints.pending:
            self._attempts[number].waiting = self._checkpoints.waiting_for(number)

    def _follow(self, actions: list[cp.Action[Acked]], now_s: float) -> list[Out]:
        out: list[Out] = []
        for action in actions:
            match action:
                case cp.Inject(barrier=barrier):
                    out.append(Send(None, Tripped(barrier=barrier)))
                case cp.Commit(checkpoint=number, epoch=epoch, parts=parts):
                    attempt = self._attempts[number]
                    attempt.parts = parts
                    # One is through before the next one is written: a savepoint is a whole cut.
                    to = self._unwritten if self._publishing else out
                    to.append(Write(number, epoch, parts, attempt.cuts, attempt.began_s))
                case cp.Complete(checkpoint=number, epoch=epoch, is_last=is_last):
                    found = self._attempts[number].parts
                    assert found is not None
                    self._publishing = True
                    out.append(Publish(number, epoch, found, is_last))
                case cp.Aborted():
                    out += self._aborted(action, now_s)
        return out

    def _aborted(self, gone: cp.Aborted, now_s: float) -> list[Out]:
        attempt = self._attempts.pop(gone.checkpoint)
        for assigner in self.splits.assigners.values():
            assigner.abort(gone.checkpoint)
        if self._trigger is not None:
            self._trigger.ended(attempt.request, now_s)
        took_s = now_s - attempt.began_s
        out: list[Out] = [
            Send(None, Aborted(checkpoint=gone.checkpoint)),
            Settled(
                gone.checkpoint, gone.epoch, gone.reason, took_s, attempt.request, attempt.waiting
            ),
        ]
        if self._failures.failed(gone.checkpoint, gone.reason):
            by = f", by {gone.by.vertex}/{gone.by.index}" if gone.by else ""
            if gone.reason is Reason.EXPIRED:
                by = f"; it waited for {named(attempt.waiting)}"
            out += self._break(
                CheckpointsFailedError(
                    f"Checkpoint {gone.checkpoint} was given up ({gone.reason.value}{by}), and "
                    f"{self._options.tolerable_failures} failures are tolerable.",
                    todo="See the log for why; raise timeout_s or tolerable_failures if it is "
                    "only slow.",
                )
            )
        return out

    def _break(self, error: StateBackendError) -> list[Out]:
        if self._over:
            return []
        self._over = True
        return [Broken(error)]
