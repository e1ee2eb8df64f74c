"""Who reads which split, and what of that belongs to a checkpoint. Pure: driven by the driver.

A split is in one of three places: here (pending), with a subtask that reads it (an element of that
subtask's list state), or read to its end. A checkpoint takes the first from here and the second
from the subtasks, at different moments, and must still hold each split once:

* `cut` takes what is pending when the checkpoint is triggered, before any barrier goes out;
* a split that is handed out after that goes only to a subtask that has *passed* the barrier, since
  one that has not would write the split into the same checkpoint once more;
* a split that was handed out before it must be in the subtask's hands when it takes the barrier. So
  a source subtask does not take a barrier while a request of its own is unanswered.

Where the answer to a request may get lost and be asked for again, the request carries a number:
the same number gets the same split.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from statebackend.continuous.sources.source import Discovery, Json
from statebackend.continuous.sources.split_assignment import Assignment
from statebackend.errors import CorruptionError, ProtocolError, UnsupportedFormatError

__all__ = ["FORMAT_VERSION", "WAIT", "SplitAssigner", "Wait"]

FORMAT_VERSION: Final = 1


class Wait:
    """There may be a split later: ask again."""

    def __repr__(self) -> str:
        return "WAIT"

    def __reduce__(self) -> str:
        return "WAIT"


WAIT: Final = Wait()


class _State(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes are those of the assigner; `v` is the format's version."""

    v: int
    discovery: Json | None
    done: bool
    pending: list[Assignment]


class SplitAssigner:
    """The splits of one source, handed out on request, in the order of their discovery.

    Everything is called by one thread.
    """

    def __init__(self, parallelism: int, *, splits_end: bool = True) -> None:
        """With nothing discovered.

        Args:
            parallelism: subtasks of the source.
            splits_end: `Source.splits_end`. Where splits do not end, no subtask gets more than its
                fair share, so that each has some.
        """
        self._parallelism = parallelism
        self._splits_end = splits_end
        self._pending: deque[Assignment] = deque()
        self._discovery: Json | None = None
        self._done = False
        self._held: list[set[str]] = [set() for _ in range(parallelism)]
        self._known: set[str] = set()
        self._answered: dict[int, tuple[int, Assignment]] = {}
        self._cuts: set[int] = set()  # triggered, neither complete nor aborted
        self._passed = [-1] * parallelism

    # --- discovery ---

    @property
    def discovery_state(self) -> Json | None:
        """What `Source.discover` is to be given; None before the first."""
        return self._discovery

    @property
    def done(self) -> bool:
        """Whether nothing more will be discovered."""
        return self._done

    @property
    def pending(self) -> Sequence[Assignment]:
        """What was not handed out yet."""
        return tuple(self._pending)

    def add(self, found: Discovery) -> None:
        """Take in a discovery: its splits and its state, at once.

        Raises:
            ProtocolError: a split that this run knows already.
        """
        self._take(Assignment(split=split) for split in found.splits)
        self._discovery = found.state
        self._done = found.done

    def _take(self, assignments: Iterable[Assignment]) -> None:
        for assignment in assignments:
            id = assignment.split.id
            if id in self._known:
                raise ProtocolError(
                    f"The split {id!r} is in the source twice.",
                    todo="A split's id must be its own: see the source's discover().",
                )
            self._known.add(id)
            self._pending.append(assignment)

    # --- handing out ---

    def request(self, subtask: int, number: int | None = None) -> Assignment | Wait | None:
        """The next split for a subtask; WAIT: none now; None: none ever again.

        Args:
            subtask: index of the source's subtask, from 0.
            number: rises with each request of the subtask in a run; the same number asked again
                gets the split that it got.
        """
        before = self._answered.get(subtask)
        if before is not None and number is not None and before[0] == number:
            return before[1]
        if not self._pending:
            return None if self._done else WAIT
        if self.waits_for_barrier(subtask) or not self._may_have(subtask):
            return WAIT
        assignment = self._pending.popleft()
        self._held[subtask].add(assignment.split.id)
        if number is not None:
            self._answered[subtask] = (number, assignment)
        return assignment

    def _may_have(self, subtask: int) -> bool:
        if self._splits_end:
            return True
        total = len(self._pending) + sum(map(len, self._held))
        share = -(-total // self._parallelism)
        return len(self._held[subtask]) < share

    def waits_for_barrier(self, subtask: int) -> bool:
        """Whether there are splits, and none for a subtask before it has passed a barrier."""
        return bool(self._pending) and self._passed[subtask] < max(self._cuts, default=-1)

    def finished(self, subtask: int, split_id: str) -> None:
        """A subtask has read a split to its end; said twice it counts once."""
        self._held[subtask].discard(split_id)

    # --- checkpoints ---

    def cut(self, checkpoint: int) -> bytes:
        """The assigner's part of a checkpoint; called when it is triggered, before its barriers go.

        Raises:
            ProtocolError: the number does not rise.
        """
        highest = max((*self._cuts, *self._passed))
        if checkpoint <= highest:
            raise ProtocolError(
                f"Checkpoint {checkpoint} was cut after {highest}.",
                todo="A checkpoint's number is used once, and rises within a run.",
            )
        self._cuts.add(checkpoint)
        state = _State(
            v=FORMAT_VERSION,
            discovery=self._discovery,
            done=self._done,
            pending=list(self._pending),
        )
        return msgspec.json.encode(state)

    def passed(self, subtask: int, checkpoint: int) -> None:
        """A subtask has taken its part of a checkpoint and sent the barrier on."""
        self._passed[subtask] = max(self._passed[subtask], checkpoint)

    def complete(self, checkpoint: int) -> None:
        """The checkpoint, and with it every earlier one, is over."""
        self._cuts = {cut for cut in self._cuts if cut > checkpoint}

    def abort(self, checkpoint: int) -> None:
        """The checkpoint will never be complete: nobody needs to wait for its barrier."""
        self._cuts.discard(checkpoint)

    def restore(self, state: bytes | None, positions: Iterable[Assignment]) -> None:
        """Begin a run where a checkpoint is: on a new object, before anything else.

        The splits that were being read come first, with their positions; whoever asks gets them,
        at any parallelism.

        Args:
            state: of `cut`; None for a first start.
            positions: the elements of all source subtasks' list state in that checkpoint.

        Raises:
            CorruptionError: the state is not of this kind.
            UnsupportedFormatError: a later release wrote it.
            ProtocolError: a split is in both, or twice.
        """
        if self._known or self._cuts:
            raise ProtocolError("The assigner is in use already.", todo="Restore a new one.")
        found = _decode(state) if state is not None else None
        # Subtasks come in the order of their index, which says nothing about the splits' order.
        self._take(sorted(positions, key=_by_id))
        if found is not None:
            self._take(found.pending)
            self._discovery = found.discovery
            self._done = found.done


def _by_id(assignment: Assignment) -> str:
    return assignment.split.id


def _decode(state: bytes) -> _State:
    try:
        head: Any = msgspec.json.decode(state)
        version = head["v"]
        if version == FORMAT_VERSION:
            return msgspec.json.decode(state, type=_State)
    except (msgspec.MsgspecError, RecursionError, KeyError, TypeError) as error:
        raise CorruptionError(
            f"The state of a source's splits is not what a source writes: {error}.",
            todo="Restore from an older checkpoint.",
        ) from error
    raise UnsupportedFormatError(
        f"The state of a source's splits has format {version!r}.",
        todo=f"This release reads format {FORMAT_VERSION}: use the one that wrote it.",
    )
