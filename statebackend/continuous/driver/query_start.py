"""Starts a continuous job: checks what was built, begins with a savepoint, and makes the query."""

from __future__ import annotations

import functools

from statebackend.continuous.driver.continuous_query import ContinuousQuery
from statebackend.continuous.driver.job_from_savepoint import begin_with
from statebackend.continuous.driver.slot_stage import Cluster, cluster_of
from statebackend.continuous.driver.takeover import default_parallelism, groups_of, operators_of
from statebackend.continuous.job.flow import Flow
from statebackend.continuous.job.job_options import RunOptions
from statebackend.errors import JobRunningError, SettingError
from statebackend.runtime.driver.job_start import specs_of

__all__ = ["start"]


def start(
    flow: Flow, parallelism: int | None, options: RunOptions, cluster: Cluster | None = None
) -> ContinuousQuery:
    """See `ContinuousStream.start`. ``cluster``: default: the backend's session."""
    setup, job = flow.setup, flow.setup.job
    if not flow.sinks:
        raise SettingError(
            f"Job {job.name!r} has no sink.", todo="Call sink() on one of its streams."
        )
    if parallelism is None:
        parallelism = default_parallelism(setup)
    if not isinstance(parallelism, int) or parallelism < 1:
        raise SettingError(f"The parallelism is {parallelism!r}.", todo="Give 1 or more.")
    if options.mode == "at_least_once" and flow.graph(parallelism, parallelism).single:
        raise SettingError(
            "With mode='at_least_once' subtasks take rules that go to all of them into different "
            "checkpoints.",
            todo="Leave mode= out.",
        )
    running = ContinuousQuery.running_jobs.get(job.store.uri)
    if running is not None and running.is_active:
        raise JobRunningError(
            f"Job {job.name!r} in {job.uri} is being run by this driver.",
            todo="Stop that query first, or give this one another job= name.",
        )
    groups = groups_of(job, setup.settings, parallelism)
    operators = operators_of(flow, parallelism, groups)
    dropped = setup.allow_dropped_state
    check = functools.partial(specs_of, job.name, operators, allow_dropped_state=dropped)
    if setup.savepoint is not None:
        begin_with(setup.savepoint, job, check)
    check(job.manifests())
    graph = flow.graph(parallelism, groups)
    query = ContinuousQuery(flow, graph, options, operators, cluster or cluster_of(setup))
    ContinuousQuery.running_jobs[job.store.uri] = flow.query = query
    try:
        query.begin()
    except BaseException:
        query.forget()
        raise
    return query
