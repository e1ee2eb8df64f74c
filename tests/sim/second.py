"""A second operator of a query: beside the first, of a source of its own, or fed by its output.

It has its own uid, parallelism, records and local stores, and shares the rest with the first: the
driver, its coordinator's epochs, the workers and the batch, which counts when both have ended well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from statebackend.errors import StateBackendError
from statebackend.keygroups import subtask_of
from tests.sim.kernel import current
from tests.sim.location import GROUPS, Committed, Plan, State, after, rows_of
from tests.sim.stage import Stage
from tests.sim.threads import Event

if TYPE_CHECKING:
    from tests.sim.app import App, Query
    from tests.sim.task import Attempt

__all__ = ["BESIDE", "CHAINED", "UID", "begin", "commit", "gathered", "run_both"]

UID: Final = "second"
BESIDE: Final = "beside"
CHAINED: Final = "chained"

Row = tuple[bytes, int]


def _rows_beside(plan: Plan, salt: int, keys: int) -> tuple[Row, ...]:
    return rows_of(replace(plan, seed=plan.seed ^ 0x5BD1E995), salt, 1, keys)[0]


def _rows_chained(output: State) -> tuple[Row, ...]:
    """A row for each key of an output; its key is in another key group."""
    rows = []
    for key, value in sorted(output.items()):
        group = (int.from_bytes(key[:2], "big") * 31 + 7) % GROUPS
        rows.append((group.to_bytes(2, "big") + key[2:], int(value or b"0") % 12))
    return tuple(rows)


def _dealt(rows: Iterable[Row], parallelism: int) -> tuple[tuple[Row, ...], ...]:
    by_subtask: list[list[Row]] = [[] for _ in range(parallelism)]
    for key, amount in rows:
        group = int.from_bytes(key[:2], "big")
        by_subtask[subtask_of(group, parallelism, GROUPS)].append((key, amount))
    return tuple(map(tuple, by_subtask))


def gathered(done: Mapping[int, Attempt]) -> State:
    """The output of the attempts that count."""
    return {k: v for p in sorted(done) for k, v in done[p].output.items()}


# --- a batch -------------------------------------------------------------------------------------


def begin(app: App, session: str, plan: Plan, first: Stage, before: Committed | None) -> Stage:
    """The second operator's part in a batch."""
    state = before.second.state if before is not None and before.second is not None else None
    if plan.batch == 0:
        state = {}
    stage = Stage(app, session, plan, state, uid=UID, parallelism=app.second_parallelism)
    keys = app.world.config.keys
    stage.rows_by = lambda salt: _dealt(_rows_beside(plan, salt, keys), stage.parallelism)
    stage.attempts = first.attempts
    return stage


def run_both(app: App, query: Query, first: Stage, second: Stage) -> dict[int, Attempt]:
    """Both operators' tasks: one after the other, or side by side; the second's are in its
    ``counted`` then."""
    if app.world.config.second == CHAINED:
        done = first.run(query)
        rows = _dealt(_rows_chained(gathered(done)), second.parallelism)
        second.rows_by = lambda salt: rows
        second.counted = second.run(query)
        return done
    ended, failures = Event(), []

    def run() -> None:
        try:
            second.counted = second.run(query)
        except StateBackendError as error:
            failures.append(error)
            first.abandon()
            first.nudge()
        finally:
            ended.set()

    running = current().sched.spawn(app.process, run)
    try:
        done = first.run(query)
    except StateBackendError:
        second.abandon()
        second.nudge()
        raise
    ended.wait()
    del running
    if failures:
        raise failures[0]
    return done


def commit(app: App, second: Stage, model: State) -> tuple[Committed, State] | None:
    """What a batch made of the second operator, by the model; and the model's output of it.

    Args:
        model: the first operator's output.
    """
    if second.state is None:
        return None
    rows = _rows_chained(model)
    if app.world.config.second == BESIDE:
        rows = _rows_beside(second.plan, second.salt, app.world.config.keys)
    state, own_model = after(second.state, rows)
    return Committed(second.plan, second.salt, state, gathered(second.counted)), own_model
