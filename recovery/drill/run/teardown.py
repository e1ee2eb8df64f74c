"""The end of a drill: what goes wrong there hides neither a report nor an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType

from recovery.drill.cluster.local_cluster import Cluster
from recovery.drill.run.live_stage import LiveStage
from statebackend.errors import StateBackendError

__all__ = ["TidyStack", "end", "failure_text"]


class TidyStack(contextlib.ExitStack):
    """An `ExitStack` that writes down what fails when it is left, and lets it pass.

    Attributes:
        failures: one sentence for each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[str] = []

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        try:
            return bool(super().__exit__(kind, error, trace))
        except Exception as failed:
            self.failures.append(_sentence(failed))
            return False


def failure_text(error: Exception) -> str:
    """Why a drill was given up."""
    if isinstance(error, StateBackendError):
        return str(error)
    return f"the drill itself failed: {type(error).__name__}: {error}"


def end(stage: LiveStage, cluster: Cluster) -> list[str]:
    """End everything that runs; a sentence for each thing that went wrong."""

    def condemn() -> None:
        for driver in stage.drivers.every:
            driver.look()
            driver.condemn()

    def reap() -> None:
        for driver in stage.drivers.every:
            driver.reap()

    steps: tuple[Callable[[], None], ...] = (stage.feeder.stop, condemn, cluster.stop, reap)
    wrong = []
    for step in steps:
        try:
            step()
        except Exception as failed:
            wrong.append(_sentence(failed))
    if stage.feeder.hung:
        wrong.append("The job's feed was still busy when the drill ended; it was left alone.")
    return wrong


def _sentence(failed: Exception) -> str:
    return f"At the end of the drill: {type(failed).__name__}: {failed}"
