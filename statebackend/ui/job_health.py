"""How a job fares, in one line, and whether it may be stopped: decided from facts, without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from statebackend.texts import count, duration, when
from statebackend.ui.job_figures import RunFacts, StoredFacts, Waiting

__all__ = ["Health", "health_of", "waits_for"]

_SLOW_S: Final = 10.0  # a checkpoint that takes no longer is never called slow
_STUCK_S: Final = 60.0
_WRITING_S: Final = 3.0
_NAMED: Final = 5  # subtasks by name; of more, how many
_LISTED: Final = 20  # subtasks by number
_MISSED: Final = 3  # intervals without a checkpoint
_WHERE: Final = "The checkpoint's page says where a subtask runs; look at the log of that executor."

Level = Literal["good", "slow", "bad", "ended"]


@dataclass(frozen=True)
class Health:
    """What the first page says.

    Attributes:
        line: in one sentence or two. todo: what to look at; empty: nothing.
        safe: whether it may be stopped now; None: it does not run.
    """

    level: Level
    line: str
    todo: str = ""
    safe: bool | None = None
    safe_line: str = ""


def health_of(facts: RunFacts | StoredFacts, usual_ms: float | None = None) -> Health:
    """What to say of a job.

    Args:
        usual_ms: how long its checkpoints take; None: not known.
    """
    if isinstance(facts, StoredFacts):
        return _stored(facts)
    if not facts.active and not facts.starting:
        return _ended(facts)
    level, line, todo = _running(facts, usual_ms)
    safe, safe_line = _safe(facts)
    return Health(level, line, todo, safe, safe_line)


def _stored(facts: StoredFacts) -> Health:
    if facts.durable_epoch is None:
        return Health(
            "ended", "No checkpoint is durable yet. The job does not run in this process."
        )
    line = (
        f"Checkpoint {facts.durable_epoch} is the newest, written {when(facts.written_ms)} by "
        f"{facts.writer}. Whether the job runs, its own driver knows."
    )
    if facts.problems:
        todo = f"{count(len(facts.problems), 'problem')} below: `statebackend verify` says more."
        return Health("slow", line, todo)
    return Health("ended", line)


def _ended(facts: RunFacts) -> Health:
    none = facts.durable_epoch is None
    after = "before any checkpoint" if none else f"after checkpoint {facts.durable_epoch}"
    onward = f"The next start {'begins anew' if none else 'goes on from there'}."
    if facts.failure:
        todo = f"{onward} The error's code is in the list of errors."
        return Health("bad", f"Failed {after}: {facts.failure}", todo)
    return Health("ended", f"Stopped {after}. {onward}")


def _running(facts: RunFacts, usual_ms: float | None) -> tuple[Level, str, str]:
    if facts.failure:
        return "bad", f"Nothing is committed any more: {facts.failure}", "Stop the query."
    if facts.store_out_s is not None:
        line = (
            f"Stuck: the object store has not answered for {duration(facts.store_out_s)}. "
            "Nothing is committed until it does."
        )
        return "bad", line, "Look at the store. The driver's log has what it said, and retries."
    if facts.starting:
        line = "Starting: the driver reads the job's log and claims it. No row is processed yet."
        return "good", line, ""
    if facts.epoch is not None and any(one.subtasks for one in facts.waiting):
        return _under_way(facts, usual_ms)
    if facts.writing:
        return _writing(facts)
    late = facts.interval_s is not None and (facts.durable_s or 0.0) > _MISSED * facts.interval_s
    if late and facts.interval_s is not None:
        line = (
            f"Lagging: no checkpoint is complete for {duration(facts.durable_s or 0.0)}, and one "
            f"is due every {duration(facts.interval_s)}."
        )
        return "slow", line, "The failed ones are in the list of checkpoints, with the reason."
    if facts.behind:
        line = f"Lagging: {facts.behind}. {_newest(facts)}"
        return "slow", line, "The slowest subtasks are on the page of the newest checkpoint."
    if facts.input is False:
        return "good", f"Running, and there is no input. {_newest(facts)}", ""
    return "good", f"Running. {_newest(facts)}", ""


def _newest(facts: RunFacts) -> str:
    if facts.durable_epoch is None:
        return "No checkpoint is complete yet."
    if facts.durable_s is None:
        return f"Checkpoint {facts.durable_epoch} is complete."
    return f"Checkpoint {facts.durable_epoch} was complete {duration(facts.durable_s)} ago."


def _under_way(facts: RunFacts, usual_ms: float | None) -> tuple[Level, str, str]:
    took_s = facts.running_s or 0.0
    of = sum(one.parallelism for one in facts.waiting)
    missing = sum(len(one.subtasks) for one in facts.waiting)
    slow_s = max(_SLOW_S, 3 * (usual_ms or 0.0) / 1000)
    if took_s <= slow_s:
        acked = f"{of - missing} of {of} subtasks have saved their state"
        return "good", f"Running: checkpoint {facts.epoch} for {duration(took_s)}, {acked}.", ""
    stuck = took_s > max(_STUCK_S, 2 * slow_s)
    queued = sum(len(one.not_begun) for one in facts.waiting)
    if queued:
        moved_s = took_s if facts.moved_s is None else facts.moved_s
        stuck = stuck and moved_s > _STUCK_S
        level: Level = "bad" if stuck else "good" if usual_ms is None else "slow"
        return _queued(facts, level, of - missing, missing - queued)
    # Nobody has acked: then it is no single subtask's fault.
    whom = "all subtasks" if missing == of else _named(facts.waiting, missing)
    line = f"{'Stuck' if stuck else 'Slow'}: checkpoint {facts.epoch} has waited "
    line += f"{duration(took_s)} for {whom} to save {'its' if missing == 1 else 'their'} state."
    if missing < of:
        line += f" The other {of - missing} have."
    todo = _WHERE
    if missing == of:
        first = "their state is being read back, " if facts.durable_s is None else ""
        todo = "No subtask is through: "
        todo += f"{first}the input is large, the code is slow, or executors are gone."
    return "bad" if stuck else "slow", line, todo


def _queued(facts: RunFacts, level: Level, acked: int, at_work: int) -> tuple[Level, str, str]:
    """Spark has not started all tasks: those that run may hold the others up."""
    of = sum(one.parallelism for one in facts.waiting)
    word = {"bad": "Stuck", "slow": "Slow"}.get(level, "Running")
    working = f"{at_work} {'is' if at_work == 1 else 'are'} at work, " if at_work else ""
    line = (
        f"{word}: checkpoint {facts.epoch} for {duration(facts.running_s or 0.0)}. {acked} of {of} "
        f"subtasks have saved their state, {working}{of - acked - at_work} have not begun."
    )
    if level != "bad":
        return level, line, "" if level == "good" else "More executors or cores end it sooner."
    if not at_work:
        return level, line, "No task runs: executors are gone, or busy with something else."
    begun = [
        replace(one, subtasks=sorted({*one.subtasks} - {*one.not_begun})) for one in facts.waiting
    ]
    names = _named([one for one in begun if one.subtasks], at_work)
    return level, line, f"Those at work hold the others up: {names}. {_WHERE}"


def waits_for(one: Waiting) -> str:
    """Which of an operator's subtasks a checkpoint waits for, in a sentence."""
    idle = set(one.not_begun)
    begun = [number for number in one.subtasks if number not in idle]
    acked = one.parallelism - len(one.subtasks)
    said = [f"{acked:,} of {one.parallelism:,} subtasks have saved their state"]
    if begun and (idle or len(begun) < one.parallelism):
        more = f" and {len(begun) - _LISTED} more" if len(begun) > _LISTED else ""
        listed = ", ".join(str(number) for number in begun[:_LISTED])
        noun = "subtask" if len(begun) == 1 else "subtasks"
        said.append(f"{'at work' if idle else 'not yet'}: {noun} {listed}{more}")
    if idle:
        said.append(f"{len(idle):,} {'has' if len(idle) == 1 else 'have'} not begun")
    return f"{'; '.join(said)}."


def _writing(facts: RunFacts) -> tuple[Level, str, str]:
    """Every subtask has acked, and the record is on its way."""
    line = f"the record of checkpoint {facts.epoch} is being written"
    if facts.writing_s <= _WRITING_S:
        return "good", f"Running: {line}.", ""
    line = f"{line} for {duration(facts.writing_s)}. Nothing is committed until it is."
    todo = "The store is slow or does not answer. Each call is tried again for a minute."
    if facts.writing_s > _STUCK_S:
        return "bad", f"Stuck: {line}", todo
    return "slow", f"Slow: {line}", todo


def _named(waiting: Sequence[Waiting], missing: int) -> str:
    if missing > _NAMED and len(waiting) == 1:
        return f"{missing} subtasks of {waiting[0].operator}"
    if missing > _NAMED:
        by = ", ".join(f"{len(one.subtasks)} of {one.operator}" for one in waiting if one.subtasks)
        return f"{missing} subtasks ({by})"
    names = [f"{one.operator}/{number}" for one in waiting for number in one.subtasks]
    return f"subtask{'s' if missing > 1 else ''} {', '.join(names)}"


def _safe(facts: RunFacts) -> tuple[bool, str]:
    """Whether a stop now is one that nobody regrets, and what it costs."""
    slow = facts.writing and facts.writing_s > _WRITING_S
    if facts.store_out_s is not None or slow:
        return False, (
            "Not now. A stop loses nothing that is durable, but the next start needs the store. "
            "Bring it back first."
        )
    if facts.durable_epoch is None:
        return True, "Yes, but nothing is durable yet: the next start begins anew."
    if facts.asynchronous and facts.writing:
        return False, (
            "In a moment: a record is on its way. backend.wait_durable() waits for it after the "
            "stop."
        )
    if facts.continuous:
        ago = "" if facts.durable_s is None else f" ({duration(facts.durable_s)} ago)"
        return True, (
            f"Yes. The next start goes on from checkpoint {facts.durable_epoch}{ago}, and reads "
            "again what came after it. stop_with_savepoint() ends it with nothing to repeat."
        )
    again = "" if facts.epoch is None else " The batch that runs now is run again."
    return True, f"Yes. The next start goes on after checkpoint {facts.durable_epoch}.{again}"
